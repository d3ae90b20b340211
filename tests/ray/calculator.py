"""Rows of one to six turns with a tool, for the demo model. Workers import it."""

import functools
import os
import random
import re
from decimal import Decimal

from raymoe.assets.wrangling import make_rows
from tests.ray.matrix import HeldBack

AMOUNT = re.compile(r"-?\d+(\.\d+)?")
MAX_TURNS = 6


def make_bills(num_rows):
    """Rows with one to six amounts as people write them."""
    lengths = random.Random(3)
    tasks = (row.prompt for row in make_rows(100 * num_rows, seed=7) if row.kind == "amount")
    return [
        {"id": f"row-{i}", "items": [next(tasks) for _ in range(lengths.randint(1, MAX_TURNS))]}
        for i in range(num_rows)
    ]


def add(total, text):
    """The calculator: the sum of a total and the first number of a text."""
    found = AMOUNT.search(text)
    return total if found is None else total + Decimal(found[0])


async def add_up(row, generate):
    """Ask for each amount in canonical form, and have the calculator add it to those before."""
    text, total, answers = "", Decimal(0), []
    for item in row["items"]:
        text += item
        answer = await generate(text)
        answers.append(answer.text)
        total = add(total, answer.text)
        text += f"{answer.text} total: {total}\n"
    return {"answers": answers, "total": str(total), "text": text}


class HeldBackTurns(HeldBack):
    """Logs rows whose functions are over."""

    def __init__(self, *args, log, **kwargs):
        super().__init__(*args, log=log, **kwargs)
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._rollouts.submit = functools.partial(self.submit_and_log, self._rollouts.submit)

    def submit_and_log(self, submit, requests):
        futures = submit(requests)
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(functools.partial(self.write, request.row_key))
        return futures

    def write(self, key, future):
        if future.exception() is None:
            os.write(self.log, f"{key}\n".encode())
