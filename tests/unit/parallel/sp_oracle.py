"""Run by test_oracle.py: one case under diffusers' own context parallelism and under ours, in forked ranks.

usage: sp_oracle.py CASE SIZE; prints the largest absolute differences from one process as JSON.
diffusers asks for an accelerator when it sets itself up, so the parts behind that question are called here.
"""

import json
import multiprocessing as mp
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import sp_models as models
from diffusers import ContextParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from torch.distributed.device_mesh import init_device_mesh

from spotlight.parallel import comm
from spotlight.parallel.ulysses import install


def mask():
    return torch.arange(16)[None] < 11


CASES = {
    "qwen": (models.qwen, lambda: models.qwen_inputs()),
    "qwen-mask": (models.qwen, lambda: models.qwen_inputs(mask=mask())),
    "flux": (models.flux, lambda: models.flux_inputs()),
}


def diffusers_output(model, inputs, size, rank):
    config = ContextParallelConfig(ulysses_degree=size)
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(rank, size, torch.device("cpu"), mesh=mesh)
    for module in model.modules():
        if isinstance(module, Attention | AttentionModuleMixin) and hasattr(
            module.processor, "_parallel_config"
        ):
            module.processor._parallel_config = parallel
    apply_context_parallel(model, config, model._cp_plan)
    with torch.no_grad():
        return model(**inputs)[0]


def rank_main(case, size, rank, port, queue):
    torch.set_num_threads(1)
    build, make = CASES[case]
    with torch.no_grad():
        expected = build()(**make())[0]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    model = build()
    install(model).bind(comm.form(("127.0.0.1", port), "ours", rank, size, form_timeout_s=30))
    with torch.no_grad():
        ours = model(**make())[0]
    world = dist.PrefixStore("world", store)
    dist.init_process_group("gloo", store=world, rank=rank, world_size=size)
    theirs = diffusers_output(build(), make(), size, rank)
    queue.put(
        {"ours": (ours - expected).abs().max().item(), "theirs": (theirs - expected).abs().max().item()}
    )
    dist.barrier()
    dist.destroy_process_group()


def main():
    case, size = sys.argv[1], int(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=rank_main, args=(case, size, r, store.port, queue)) for r in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    results = [queue.get() for process in ranks if process.exitcode == 0]
    assert len(results) == size, [process.exitcode for process in ranks]
    print(json.dumps({key: max(r[key] for r in results) for key in ("ours", "theirs")}))


if __name__ == "__main__":
    main()
