"""Real processes over gloo that stay alive: each runs the functions it is sent, so that they are started only once."""

import datetime
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from divebatch.ranks import Ranks

PATIENCE = 100.0
"""Seconds after which a function that has not answered counts as hanging."""
GROUPS: dict[int, Ranks] = {1: Ranks.alone()}
"""In a worker: the ranks of its groups by their size."""


class RankPool:
    """`size` processes of one group; `run` lets the first few of them run a function, each as a rank."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "divebatch"])  # torch is imported once for all
        pipes = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, size, str(folder / "group")), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def answers(self, size: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """What each of the first `size` ranks returned or raised. `function` gets its `Ranks` first."""
        members = self._connections[:size]
        for connection in members:
            _send(connection, (size, function, arguments, named))
        return [self._answer(connection) for connection in members]

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """The same; what a rank raised is raised here."""
        answers = self.answers(size, function, *arguments, **named)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answer(self, connection: Connection) -> Any:
        if not connection.poll(PATIENCE):
            self.close()
            raise AssertionError(f"a rank has not answered for {PATIENCE} s: the ranks hang")
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError as error:  # its process is gone
            return error


def _send(connection: Connection, message: Any) -> None:
    """By value: tensors that go through `connection.send` are shared memory, and ranks must not share theirs."""
    connection.send_bytes(pickle.dumps(message))


def _serve(connection: Connection, rank: int, size: int, file: str) -> None:
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    timeout = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timeout)
    GROUPS[size] = Ranks.here()
    for members in range(2, size):
        group = dist.new_group(list(range(members)))
        if rank < members:
            GROUPS[members] = Ranks.here(group)
    while True:
        members, function, arguments, named = pickle.loads(connection.recv_bytes())
        try:
            _send(connection, function(GROUPS[members], *arguments, **named))
        except Exception as error:
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            _send(connection, error)
