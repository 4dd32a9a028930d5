#!/usr/bin/env bash
# A command in the style of Megatron-Core's examples (mixtral/train_mixtral_8x7b_distributed.sh) for the small GPT of
# megatron_2021_style.sh, with experts in every layer; NUM_EXPERTS=0 EP=1 gives that very model. The default data are
# those of examples/quickstart.sh.
#
#   bash examples/megatron_current_style.sh
#   DATA_PATH=my_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt bash examples/megatron_current_style.sh

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=${GPUS_PER_NODE:-2}
MASTER_ADDR=${MASTER_ADDR:-"localhost"}
MASTER_PORT=${MASTER_PORT:-"6000"}
NNODES=${NNODES:-"1"}
NODE_RANK=${RANK:-"0"}

DATA_PATH=${DATA_PATH:-runs/quickstart/data/corpus_text_document}
VOCAB_FILE=${VOCAB_FILE:-runs/quickstart/data/vocab.json}
MERGE_FILE=${MERGE_FILE:-runs/quickstart/data/merges.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/megatron_current_style}

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)

MODEL_ARGS=(
    --use-mcore-models
    --transformer-impl local
    --seq-length 64
    --max-position-embeddings 64
    --num-layers 2
    --hidden-size 64
    --ffn-hidden-size 256
    --num-attention-heads 4
    --init-method-std 0.02
    --attention-dropout 0.1
    --hidden-dropout 0.1
    --normalization LayerNorm
    --position-embedding-type learned_absolute
    --no-masked-softmax-fusion
)

MOE_ARGS=(
    --num-experts ${NUM_EXPERTS:-4}
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)

DATA_ARGS=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file $VOCAB_FILE
    --merge-file $MERGE_FILE
    --data-path $DATA_PATH
    --split 90,8,2
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 8
    --lr 0.0015
    --train-iters 20
    --lr-decay-iters 16
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --min-lr 1.0e-5
    --weight-decay 0.01
    --clip-grad 1.0
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP:-2}
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size ${EP:-2}
    --expert-tensor-parallel-size 1
    --overlap-grad-reduce
)

LOGGING_ARGS=(
    --log-interval 5
    --save-interval 10
    --eval-interval 10
    --eval-iters 2
    --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH
    --tensorboard-dir "${CHECKPOINT_PATH}/tensorboard"
    --ckpt-format torch_dist
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${MOE_ARGS[@]} \
    ${DATA_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${LOGGING_ARGS[@]}
