"""The RL algorithm: torch, but no ray and no cloud."""
