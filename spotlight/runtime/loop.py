"""The algorithm on one page.

    roll out   all GPUs regenerate the chosen seeds with the current weights, and score them
    train      the on-demand GPUs take optimiser steps; meanwhile
    explore    the spot GPUs draft seeds for the next iteration, with weights that are one version old
    publish    every node admits the new weights before it serves again

Drafts choose seeds. What is trained on is always made again with fresh weights and scored again.
"""

from __future__ import annotations

import time

from spotlight.errors import BudgetError
from spotlight.runtime.driver import Driver, Groups


def train(driver: Driver, *, first: int = 0, groups: Groups = ()) -> None:
    """Run the iterations from `first` on; `groups` are the seeds chosen for it before a checkpoint."""
    config = driver.place.config
    last = config.iterations
    if not groups:
        driver.explore(first)  # while the base model is evaluated there is time to draft
        driver.evaluate(first)
        groups = driver.choose(first)
    for iteration in range(first, last):
        began = time.monotonic()
        done = iteration + 1
        driver.begin(iteration)
        outcomes = driver.roll_out(iteration, groups)
        if done < last:
            driver.explore(done)
        else:
            driver.release_spot()
        driver.train(iteration, outcomes)
        if done % config.eval_every == 0 or done == last:
            driver.evaluate(done)
        groups = driver.choose(done) if done < last else []
        driver.publish()
        over = driver.spent()
        # First: what a checkpoint covers is never done again, so its numbers would be lost with the driver.
        driver.report(iteration, time.monotonic() - began)
        if done % config.checkpoint_every == 0 or done == last or over:
            driver.checkpoint(done, groups)
        if over and done < last:
            raise BudgetError(
                f"stopped after iteration {iteration}: {over}", hint="raise the budget and --resume"
            )
