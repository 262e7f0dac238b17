"""The engines that schedule otherwise: SGLang and llama.cpp."""

from asyncio import AbstractEventLoop

from loadtests.colocation.virtual.ask import Seq
from loadtests.colocation.virtual.engine import Engine
from loadtests.colocation.virtual.profiles import Profile


class SglangEngine(Engine):
    """SGLang without mixed chunks: a step computes prompts or decodes, prompts first.

    The half-computed prompt goes on before any other begins, so at most one is half-computed.
    """

    def _schedule(self) -> None:
        budget = self.profile.chunk
        for seq in self.running:
            if not seq.emitted or seq.need - seq.computed > 1:
                count = min(seq.need - seq.computed, budget)
                self._grow(seq, seq.computed + count)
                self._prefills.append((seq, count))
                budget -= count
        self._disturbed = False
        self._admit(budget)
        if not self._prefills:
            self._decode_all()

    def _decode_all(self) -> None:
        before = self.preempted
        index = 0
        while index < len(self.running):
            seq = self.running[index]
            if self._make_room(seq, seq.computed + 1) is None:
                break
            self._decodes.append(seq)
            index += 1
        self._disturbed = self.preempted > before


class _Slot:
    """One slot of llama.cpp. It keeps the tokens of its last prompt, `cached` of them computed, for `name`."""

    __slots__ = ("cached", "name", "seq", "used_at")

    def __init__(self) -> None:
        self.name: object = None
        self.cached = 0
        self.seq: Seq | None = None
        self.used_at = 0.0


class LlamaEngine(Engine):
    """llama.cpp's server: slots of equal context, no preemption.

    Each step every slot that decodes adds a token; the rest of the step's batch is filled with prompts in order of the
    slots, so that one long prompt takes it all. A slot keeps what it computed last, and the same prompt goes on there.
    """

    def __init__(self, profile: Profile, loop: AbstractEventLoop) -> None:
        super().__init__(profile, loop)
        self._slots = [_Slot() for _ in range(profile.seqs)]

    def _used(self) -> float:
        return sum(slot.seq.computed for slot in self._slots if slot.seq is not None) / self.profile.kv_tokens

    def _schedule(self) -> None:
        self._seat()
        budget = self.profile.chunk
        prompts = []
        for slot in self._slots:
            seq = slot.seq
            if seq is not None and seq.emitted and seq.need - seq.computed == 1:
                self._decodes.append(seq)
                budget -= 1
            elif seq is not None:
                prompts.append(seq)
        for seq in prompts:
            count = min(seq.need - seq.computed, budget)
            if count > 0:
                self._prefills.append((seq, count))
                budget -= count

    def _seat(self) -> None:
        """Give free slots to who waits, in order of arrival: the one that knows the prompt, else the longest unused."""
        while self.waiting:
            free = [slot for slot in self._slots if slot.seq is None]
            if not free:
                return
            seq = self.waiting.pop(0)
            slot = next((one for one in free if one.name == seq.ask.name), min(free, key=lambda one: one.used_at))
            seq.computed = min(slot.cached, seq.need - 1) if slot.name == seq.ask.name else 0
            slot.name, slot.seq, seq.slot = seq.ask.name, seq, slot
            self.running.append(seq)

    def _spare(self) -> int:
        return 1 << 30

    def _filled(self, seq: Seq) -> None:
        pass

    def _grow(self, seq: Seq, tokens: int) -> None:
        pass

    def _release(self, seq: Seq) -> None:
        slot = seq.slot
        slot.cached, slot.seq, slot.used_at = seq.computed, None, self.loop.time()


def engine(profile: Profile, loop: AbstractEventLoop) -> Engine:
    """The model that a profile asks for."""
    return {"vllm": Engine, "sglang": SglangEngine, "llamacpp": LlamaEngine}[profile.engine](profile, loop)
