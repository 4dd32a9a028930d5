"""From the configuration and the groups to a model. Floor 6."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from megatron_parm.config.bert import BertConfig
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.run import RunConfig
from megatron_parm.layers.feed_forward import Activation, gates_of
from megatron_parm.layers.initialise import Initialiser, initialise_weights
from megatron_parm.layers.recompute import Recomputation
from megatron_parm.layers.rotary import Llama3Scaling, RotaryShape, YarnScaling
from megatron_parm.models.bert import BertModel
from megatron_parm.models.block import FeedForwardMaker, make_feed_forward
from megatron_parm.models.classifier import BertClassifier
from megatron_parm.models.execution import Execution, LayerRecompute
from megatron_parm.models.gpt import GPTModel
from megatron_parm.models.moe_layer import make_moe_layer
from megatron_parm.models.shape import ModelShape
from megatron_parm.moe.balance import update_expert_biases
from megatron_parm.moe.choose import Choice, choose
from megatron_parm.moe.cost import PUBLISHED, CostModel, LayerShape
from megatron_parm.moe.layer import MoELayer
from megatron_parm.moe.losses import BackwardScale
from megatron_parm.moe.record import RoutingRecord, RoutingSummary
from megatron_parm.parallel.context import ParallelContext

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "openai_gelu": "gelu_tanh",
    "squared_relu": "squared_relu",
    "swiglu": "swiglu",
}


LanguageModel = GPTModel | BertModel | BertClassifier


@dataclass
class BuiltModel:
    """A model with initial weights, and what the trainer needs of its MoE layers (none in a dense model)."""

    model: LanguageModel
    choice: Choice | None
    balance_scale: BackwardScale
    record: RoutingRecord

    @property
    def moe_layers(self) -> list[MoELayer]:
        """The MoE layers of this rank, in order."""
        return [module for module in self.model.modules() if isinstance(module, MoELayer)]

    def balance_experts(self, summary: RoutingSummary, rate: float) -> None:
        """Move the routers' biases, where they have some, by the loads of a whole step."""
        update_expert_biases([layer.router for layer in self.moe_layers], summary, rate)

    def use_schedule(self, name: str, chunks: int, reason: str) -> None:
        """Run every MoE layer by the schedule of that name from now on."""
        assert self.choice is not None, "a dense model has no schedule"
        self.choice = replace(self.choice, schedule=name, chunks=chunks, reason=reason)
        self.try_schedule(name, chunks)

    def try_schedule(self, name: str, chunks: int) -> None:
        """Run every MoE layer by the schedule of that name, whatever the choice."""
        for layer in self.moe_layers:
            layer.schedule, layer.chunks = name, chunks


def build_gpt(
    config: RunConfig,
    vocab_size: int,
    padded_vocab_size: int,
    ctx: ParallelContext,
    generator: torch.Generator,
    cost_model: CostModel = PUBLISHED,
    *,
    draws_weights: bool = True,
) -> BuiltModel:
    """The GPT of a resolved `config`, the same weights on every layout. Call on all ranks.

    `generator` is the stream of dropout on activations that are identical on tp. Under sequence parallelism none is,
    and dropout draws from the device's default stream, which differs on tp. The MoE layers get the schedule of least
    cost by `cost_model`, or the one of the flags. Without `draws_weights` they are uninitialised.
    """
    shape = model_shape(config, vocab_size, padded_vocab_size)
    dtype = DTYPES[config.training.precision]
    choice = choose_schedule(config, ctx, cost_model)
    scale, record = BackwardScale(), _routing_record(config)
    execution = execution_of(config, generator, record)
    model = GPTModel(
        shape,
        feed_forward_maker(config, shape, choice, scale, record, ctx, generator, execution),
        tp=ctx.tp,
        generator=None if execution.sequence_parallel else generator,
        dtype=dtype,
        device=ctx.device,
        parts=config.parallel.stages(config.model.num_layers)[ctx.pp.rank :: ctx.pp.size],
        execution=execution,
    )
    if draws_weights:
        initialise_weights(model, config.training.seed)
    return BuiltModel(model, choice, scale, record)


def build_bert(
    config: RunConfig,
    vocab_size: int,
    padded_vocab_size: int,
    ctx: ParallelContext,
    generator: torch.Generator,
    cost_model: CostModel = PUBLISHED,
    *,
    draws_weights: bool = True,
) -> BuiltModel:
    """The BERT of a resolved `config`; everything else as `build_gpt`."""
    assert config.bert is not None, "these are the settings of a GPT"
    shape = _encoder_shape(config, config.bert, vocab_size, padded_vocab_size)
    dtype = DTYPES[config.training.precision]
    choice = choose_schedule(config, ctx, cost_model)
    scale, record = BackwardScale(), _routing_record(config)
    execution = execution_of(config, generator, record)
    model = BertModel(
        shape,
        feed_forward_maker(config, shape, choice, scale, record, ctx, generator, execution),
        tp=ctx.tp,
        generator=None if execution.sequence_parallel else generator,
        dtype=dtype,
        device=ctx.device,
        parts=config.parallel.stages(config.model.num_layers)[ctx.pp.rank :: ctx.pp.size],
        execution=execution,
        has_order_head=not config.bert.bert_no_binary_head,
    )
    if draws_weights:
        initialise_weights(model, config.training.seed)
    return BuiltModel(model, choice, scale, record)


def build_classifier(
    config: RunConfig,
    vocab_size: int,
    padded_vocab_size: int,
    ctx: ParallelContext,
    generator: torch.Generator,
    cost_model: CostModel = PUBLISHED,
) -> BuiltModel:
    """The classifier of a resolved `config`; everything else as `build_gpt`."""
    assert config.bert is not None and config.classify is not None, "these are the settings of another model"
    shape = _encoder_shape(config, config.bert, vocab_size, padded_vocab_size)
    choice = choose_schedule(config, ctx, cost_model)
    scale, record = BackwardScale(), _routing_record(config)
    execution = execution_of(config, generator, record)
    model = BertClassifier(
        shape,
        feed_forward_maker(config, shape, choice, scale, record, ctx, generator, execution),
        len(config.classify.class_names),
        config.classify.classifier_dropout,
        tp=ctx.tp,
        generator=None if execution.sequence_parallel else generator,
        head_generator=generator,
        dtype=DTYPES[config.training.precision],
        device=ctx.device,
        parts=config.parallel.stages(config.model.num_layers)[ctx.pp.rank :: ctx.pp.size],
        execution=execution,
    )
    initialise_weights(model, config.training.seed)
    return BuiltModel(model, choice, scale, record)


def _encoder_shape(config: RunConfig, bert: BertConfig, vocab_size: int, padded_vocab_size: int) -> ModelShape:
    return replace(
        model_shape(config, vocab_size, padded_vocab_size),
        is_causal=False,
        num_token_types=1 if bert.bert_no_binary_head else 2,
        norm_placement="post" if bert.bert_layout == "original" else "pre",
    )


def feed_forward_maker(
    config: RunConfig,
    shape: ModelShape,
    choice: Choice | None,
    scale: BackwardScale,
    record: RoutingRecord,
    ctx: ParallelContext,
    generator: torch.Generator,
    execution: Execution,
) -> FeedForwardMaker:
    """What makes each layer's feed-forward: dense, or of experts where the pattern of the settings has them.

    `generator` draws alike on the ranks of tp.
    """
    dtype = DTYPES[config.training.precision]
    pattern = config.moe_layers

    def feed_forward(layer: int, /) -> nn.Module:
        if not pattern[layer]:
            return make_feed_forward(shape, tp=ctx.tp, dtype=dtype, device=ctx.device, execution=execution)
        assert choice is not None
        return make_moe_layer(config, shape, layer, choice, scale, record, ctx, generator, dtype, execution)

    return feed_forward


def execution_of(config: RunConfig, generator: torch.Generator, record: RoutingRecord) -> Execution:
    """How the settings want the model to run. What `record` counted is not counted again by recomputation."""
    recompute = config.recompute
    layers = None
    if recompute.is_full:
        layers = LayerRecompute(recompute.recompute_method or "uniform", recompute.recompute_num_layers or 1)
    return Execution(
        sequence_parallel=config.parallel.sequence_parallel,
        recomputed_modules=frozenset(recompute.modules),
        recomputed_layers=layers,
        recomputation=Recomputation((generator,), record.paused),
    )


def model_shape(config: RunConfig, vocab_size: int, padded_vocab_size: int) -> ModelShape:
    """The dense shape that the flags describe."""
    model = config.model
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.feed_forward_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        head_dim=model.head_dim,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        max_positions=model.max_position_embeddings,
        positions=model.positions,
        rotary=_rotary_shape(model),
        activation=ACTIVATIONS[model.activation],
        normalisation=model.normalization,
        norm_epsilon=model.norm_epsilon,
        norm_is_zero_centred=model.apply_layernorm_1p,
        has_bias=model.has_linear_bias,
        has_qkv_bias=model.has_qkv_bias,
        has_norm_of_heads=model.qk_layernorm,
        norms_heads_together=model.qk_layernorm_over == "all_heads",
        window=model.window,
        ties_embeddings=not model.untie_embeddings_and_output_weights,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        residual_in_fp32=config.training.fp32_residual_connection,
        softmax_in_fp32=config.training.attention_softmax_in_fp32,
        initialiser=_initialiser(config),
    )


def _rotary_shape(model: ModelConfig) -> RotaryShape:
    scaling: Llama3Scaling | YarnScaling | None = None
    if model.use_rope_scaling:
        scaling = Llama3Scaling(
            model.rope_scaling_factor, original_positions=model.rope_original_max_position_embeddings
        )
    elif model.position_embedding_type == "yarn":
        scaling = YarnScaling(model.yarn_rotary_scaling_factor, model.yarn_original_positions)
    return RotaryShape(
        base=model.rotary_base,
        percent=model.rotary_percent,
        is_interleaved=model.rotary_interleaved,
        interpolation=model.rotary_seq_len_interpolation_factor or 1.0,
        scaling=scaling,
    )


def _routing_record(config: RunConfig) -> RoutingRecord:
    layers = [layer for layer, is_moe in enumerate(config.moe_layers) if is_moe]
    return RoutingRecord(layers, config.moe.num_experts if config.moe else 0)


def choose_schedule(config: RunConfig, ctx: ParallelContext, cost_model: CostModel = PUBLISHED) -> Choice | None:
    """The schedule of the MoE layers and why; None for a dense model. Needs no communication."""
    if config.moe is None:
        return None
    return choose(layer_shape(config, ctx), cost_model, config.moe.moe_schedule, config.moe.pipeline_chunks)


def layer_shape(config: RunConfig, ctx: ParallelContext) -> LayerShape:
    """One MoE layer of a model that has them, as the cost model sees it."""
    moe = config.moe
    assert moe is not None, "a dense model has no MoE layer"
    return LayerShape(
        num_tokens=config.data.seq_length * config.training.micro_batch_size,
        hidden_size=config.model.hidden_size,
        ffn_hidden_size=config.expert_size,
        num_experts=moe.num_experts,
        topk=moe.moe_router_topk,
        capacity_factor=moe.capacity_factor,
        min_capacity=moe.moe_min_capacity,
        has_slots=None not in (moe.capacity_factor, moe.eval_capacity_factor),
        pads=moe.moe_pad_expert_input_to_capacity,
        matrices=1 + gates_of(ACTIVATIONS[config.model.activation]),
        bytes_per_element=DTYPES[config.training.precision].itemsize,
        tp=ctx.tp.size,
        ep=ctx.ep.size,
        esp=ctx.esp.size,
        num_nodes=ctx.between.size,
        sequence_parallel=config.parallel.sequence_parallel,
    )


def _initialiser(config: RunConfig) -> Initialiser:
    if config.model.init_method_xavier_uniform:
        return Initialiser("xavier_uniform")
    return Initialiser("normal", config.model.init_method_std)
