"""A Megatron-style training stack for GPT and BERT with Mixture-of-Experts layers and Parm's schedules."""

__version__ = "0.1.0"
