"""Checkpoints that any layout can load: safetensors through torch DCP, JSON, hashes, atomic renames. Floor 6."""
