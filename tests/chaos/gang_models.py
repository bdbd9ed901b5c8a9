"""What zygotes load in these tests: the embedded model's architecture with random weights."""

import time

import torch

from spotlight.rl.models.tiny import TinyAdapter, build


class SlowTiny(TinyAdapter):
    """Waits before each forward whose first time is above 0.9: a test can act in the middle of that step."""

    delay_s = 0.0

    def velocity(self, latents, t, cond, **kwargs):
        if float(t[0]) > 0.9:
            time.sleep(self.delay_s)
        return super().velocity(latents, t, cond, **kwargs)


def tiny(spec):
    torch.manual_seed(spec.get("seed", 0))
    adapter = SlowTiny(*build(), base_id="random")
    adapter.transformer.eval().requires_grad_(False)
    adapter.delay_s = spec.get("delay_s", 0.0)
    return adapter


def broken(spec):
    raise OSError(f"no weights at {spec['path']}")


def threaded(spec):
    import threading

    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return tiny(spec)
