"""Spotlight: RL post-training of diffusion transformers on mixed on-demand and spot GPUs."""

from spotlight._mkl import same_bits_in_every_batch

__version__ = "0.1.0"

same_bits_in_every_batch()  # MKL reads it once, at its first call, so it cannot wait for those who need it
