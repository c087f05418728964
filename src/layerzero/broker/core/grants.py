"""Clients' memory that workers have: lent with the first call that needs it, taken back before it is closed."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.broker.core import actions as act
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.model import Call, Client, Worker
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.ipc.vocabulary.ops import FUNCTION


@dataclass(eq=False, kw_only=True)
class Grants:
    lifecycle: WorkerLifecycle
    effects: Effects
    keeping: frozenset[str] = frozenset({FUNCTION})  # ops whose workers keep something between calls

    def lend(self, worker: Worker, call: Call) -> None:
        """All that the call is about."""
        number, gpu = call.client.number, call.gpu
        if gpu and (number, gpu) not in worker.gpus:
            worker.gpus.add((number, gpu))
            self.effects.emit(act.GrantGpu(worker.backend, worker.generation, number, gpu, worker.slot))
        for arena in call.arenas:
            key = (number, arena)
            if key not in worker.arenas:
                worker.arenas.add(key)
                if call.route.signature.spec.op in self.keeping:
                    worker.clients.add(number)
                self.effects.emit(act.GrantArena(worker.backend, worker.generation, number, arena))

    def close_arena(self, client: Client, arena: int) -> None:
        key = (client.number, arena)
        del client.arenas[arena]
        client.retiring.discard(arena)
        for route in client.routes.values():
            route.checked.clear()
        for worker in self.lifecycle.succession.all():
            if key in worker.arenas:
                worker.arenas.discard(key)
                self.effects.emit(act.TakeBackArena(worker.backend, worker.generation, *key))
        self.effects.emit(act.CloseArena(*key))

    def tell_left(self, client: Client) -> None:
        """No call of it is open any more: workers of functions let go of what they keep for it."""
        for worker in self.lifecycle.succession.all():
            if client.number in worker.clients:
                worker.clients.discard(client.number)
                self.effects.emit(act.TellClientLeft(worker.backend, worker.generation, client.number))

    def take_back_arenas(self, client: Client, worker: Worker) -> None:
        for key in sorted(key for key in worker.arenas if key[0] == client.number):
            worker.arenas.discard(key)
            self.effects.emit(act.TakeBackArena(worker.backend, worker.generation, *key))

    def take_back_gpu(self, client: Client, gpu: str) -> None:
        """Workers let go of what they had, and may reach what is offered next."""
        key = (client.number, gpu)
        for worker in self.lifecycle.succession.all():
            worker.no_transport.pop(key, None)
            if key in worker.gpus:
                worker.gpus.discard(key)
                self.effects.emit(act.TakeBackGpu(worker.backend, worker.generation, *key))

    def close_gpu(self, client: Client, gpu: str) -> None:
        client.gpus.discard(gpu)
        self.take_back_gpu(client, gpu)
        self.effects.emit(act.CloseGpu(client.number, gpu))
