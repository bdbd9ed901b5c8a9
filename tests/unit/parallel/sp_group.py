"""A group whose ranks are threads of this process: real gloo sockets, no start-up cost."""

import itertools
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch.distributed import TCPStore

from spotlight.parallel import comm

_names = itertools.count()
_store = None


def store():
    global _store
    if _store is None:
        _store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return _store


def run_group(size, fn, **form_options):
    """fn(comm) on each of `size` ranks; returns their results in rank order, or raises the first error."""
    name, port = f"test/{next(_names)}", store().port

    form_options = {"form_timeout_s": 30, **form_options}  # a busy machine is no fault
    groups = []  # kept until every rank is done: a rank that leaves early cuts the others' last exchange

    def rank(r):
        torch.set_num_threads(1)
        group = comm.form(("127.0.0.1", port), name, r, size, **form_options)
        groups.append(group)
        try:
            return fn(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, r) for r in range(size)]
        wait(futures)
        for group in groups:
            group.close()
        return [f.result() for f in futures]
