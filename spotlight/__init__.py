"""Spotlight: RL post-training of diffusion transformers on mixed on-demand and spot GPUs."""

__version__ = "0.1.0"
