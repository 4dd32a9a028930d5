#!/usr/bin/env bash
# A command of Megatron-LM's examples of March 2021 (pretrain_gpt_distributed_with_mp.sh) for a small GPT, unchanged but
# for its sizes. The default data are those of examples/quickstart.sh.
#
#   bash examples/megatron_2021_style.sh
#   DATA_PATH=my_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt bash examples/megatron_2021_style.sh

GPUS_PER_NODE=${GPUS_PER_NODE:-2}
MASTER_ADDR=localhost
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=1
NODE_RANK=0

DATA_PATH=${DATA_PATH:-runs/quickstart/data/corpus_text_document}
VOCAB_FILE=${VOCAB_FILE:-runs/quickstart/data/vocab.json}
MERGE_FILE=${MERGE_FILE:-runs/quickstart/data/merges.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/megatron_2021_style}

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"

python -m torch.distributed.launch $DISTRIBUTED_ARGS \
       pretrain_gpt.py \
       --tensor-model-parallel-size 2 \
       --pipeline-model-parallel-size 1 \
       --num-layers 2 \
       --hidden-size 64 \
       --num-attention-heads 4 \
       --micro-batch-size 4 \
       --global-batch-size 8 \
       --seq-length 64 \
       --max-position-embeddings 64 \
       --train-iters 20 \
       --lr-decay-iters 16 \
       --save $CHECKPOINT_PATH \
       --load $CHECKPOINT_PATH \
       --data-path $DATA_PATH \
       --vocab-file $VOCAB_FILE \
       --merge-file $MERGE_FILE \
       --data-impl mmap \
       --split 90,8,2 \
       --distributed-backend nccl \
       --DDP-impl local \
       --lr 0.0015 \
       --lr-decay-style cosine \
       --min-lr 1.0e-5 \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --lr-warmup-fraction .01 \
       --checkpoint-activations \
       --log-interval 5 \
       --save-interval 10 \
       --eval-interval 10 \
       --eval-iters 2
