"""Checks a GPU part by part, each part before it is first used. A part that fails is replaced by
its fallback, with one line of output.

    part                  fallback
    device                the CPU
    pinned memory         copies from pageable memory, and tokens layer by layer
    memory limit          the budget is used for planning, but not enforced
    kernel ...            torch's kernel on every GPU, and no graph
    neuron cache's ...    no neuron cache
    products ...          products of prompts in f32
    doorbell              the driver calls the CPU's part of each layer (host function)
    host function         only the doorbell; without both, tokens go through torch layer by layer
    step                  tokens go through torch layer by layer
    graph                 the step is submitted kernel by kernel
    overlapping launches  a kernel begins when the last one has ended
    steps of N rows ...   steps have fewer rows; tried when they are first used
    graphs of N tokens    prompts are launched kernel by kernel; tried when they are first used
    passes of N tokens    prompts run in passes of half as many

Results are kept (hotsplit.artifacts.device_checks): later loads check only parts without one, and print the
same lines. A part fails by an exception, a wrong result, a time limit, or the end of the process,
which the next load finds. If the device no longer answers after a failure, this load goes to the
CPU, or a step in use raises HotsplitError; the next load takes the part's own fallback."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from hotsplit.artifacts.device_checks import CheckBook, Verdict, name_of_part
from hotsplit.errors import HotsplitError
from hotsplit.runtime.check import parts as device_parts
from hotsplit.runtime.check import slots, step_check
from hotsplit.runtime.check.doorbell import check_doorbell
from hotsplit.runtime.check.kernels import check_launch
from hotsplit.runtime.check.launches import NAMES, Launch, launches_of
from hotsplit.runtime.check.outcome import NotChecked, line_of, outcome, too_long
from hotsplit.runtime.check.parts import DeviceParts
from hotsplit.runtime.device import pinned
from hotsplit.runtime.device.cuda_runtime import DeviceLost
from hotsplit.runtime.kernels.gpu.kernels import Kernels, overlapped
from hotsplit.runtime.kernels.gpu.torch_kernels import mixed
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.hybrid_step import Backend
from hotsplit.runtime.weights import gpu_products
from hotsplit.system.progress import progress

Notice = Callable[[str], None]
Takes = Callable[[torch.device], Take]
# Time limit of a part: on a slow machine, compiling a kernel or capturing a large graph takes long.
PART_S = 60.0
ANSWER_S = 10.0  # for an idle device to answer
MORE = "hotsplit doctor says more"
NO_ROOM = "does not fit into memory"
SLOT_PARTS = {
    "neuron cache's copies": slots.check_scatter,
    "neuron cache's bits": slots.check_pack_open,
}


@dataclass(eq=False)
class DeviceCheck:
    """The checks of one load; `checked` creates it."""

    parts: tuple[DeviceParts, ...]
    notice: Notice
    keeps_budget: bool = True
    has_graph: bool = False  # a captured step is right
    _no_pinning: str = ""
    _fast: Kernels | None = None  # Triton's; None if it is missing
    _replaced: set[str] = field(default_factory=set)  # names of kernels that torch computes
    _variants: list[str] = field(default_factory=list)
    # Gives those of a step, from its number of rows.
    _launches: Callable[[Weights, int], tuple[Launch, ...]] | None = None

    def check_devices(self, *, has_budget: bool) -> bool:
        """Checks that each device can be used, pins memory and, with a budget, limits it. False if
        one must not be used."""
        for parts, book in self._books():
            why = self._try(book, parts, "device", parts.use, is_last=True)
            if why:
                self._say(parts, "device", why, "everything runs on the CPU")
                return False
            self._no_pinning = self._no_pinning or self._pinning(book, parts)
            if not has_budget or not self.keeps_budget:
                continue
            why = self._try(book, parts, "memory limit", parts.limit)
            if why:
                self.keeps_budget = False
                self._say(parts, "memory limit", why,
                          "the budget is used for planning, but not enforced")  # fmt: skip
        return True

    def _pinning(self, book: CheckBook, parts: DeviceParts) -> str:
        """The reason why nothing can be pinned, which `backend` returns; "" if pinning works."""
        why = self._try(book, parts, "pinned memory", parts.pin)
        if why:
            pinned.refuse(why)
            why = f"{_words(parts, 'pinned memory')}: {why} (copies are slower without it); {MORE}"
        return why

    def check_neuron_cache(self) -> bool:
        """Checks the neuron cache's kernels; false if they must not be used. Raises DeviceLost."""
        off = "the neuron cache is off"
        for parts, book in self._books():
            try:
                kernels = parts.slot_kernels()
            except ImportError as error:
                self._say(parts, "neuron cache", line_of(error), off)
                return False
            for part, check in SLOT_PARTS.items():
                why = self._try(
                    book, parts, part, partial(check, kernels, parts.device, parts.wait)
                )
                if why:
                    self._say(parts, part, why, off)
                    return False
            why = self._try_calls(book, parts)  # which gather the rows to be copied
            if why:
                self._say(parts, "host function", why, off)
                return False
        return True

    def check_kernels(
        self,
        weights: Weights,
        placement: Placement,
        take: Takes | None,
        max_rows: int = 1,
    ) -> None:
        """Compiles the kernels that prompts and steps of one row need, in buffers for up to
        `max_rows` rows, and compares their results with torch's. Raises DeviceLost."""
        first = self.parts[0]
        try:
            self._fast = first.kernels()
        except ImportError as error:
            self._replace(NAMES)
            self._say(first, "kernels", line_of(error), "torch computes them, more slowly")
            return
        take = take or first.backend(None, has_graph=False, kernels=self._fast).take
        found = partial(launches_of, placement=placement, take=take, max_rows=max_rows)
        launches = found(weights)
        self._launches = lambda weights, num_rows: found(weights, num_rows=num_rows)
        for parts, book in self._books():
            mine = [each for each in launches if each.device == parts.device]
            self._variants += sorted(each.variant for each in mine)
            self._check_launches(parts, book, mine)
            self._check_products(parts, book, mine)
            parts.free()

    def backend(
        self,
        build: step_check.BuildStep,
        plain: step_check.Plain,
        take: Takes | None,
        *,
        has_graph: bool,
        can_overlap: bool,
    ) -> Backend | str:
        """The backend for the best kind of decode step that works, captured or submitted, or the
        reason why there is none. `plain` computes a token layer by layer. `can_overlap`: no kernel
        writes weights. Raises DeviceLost."""
        if self._no_pinning:
            return self._no_pinning
        first = self.parts[0]
        book = CheckBook(first.key, self.notice)
        with book:
            made = self._handing_over(book, take)
            if isinstance(made, str):
                return made
            submitting = made(has_graph=False)
            part = f"step {self._plan}"
            run = partial(step_check.submitted, build, submitting, plain)
            why = self._try(book, first, part, run)
            if why:
                return f"{_words(first, part)}: {why}; {MORE}"
            if not has_graph or self._replaced:
                return replace(submitting, try_rows=self.try_rows)
            capturing = made(has_graph=True)
            why = self._try(book, first, f"graph {self._plan}",
                            partial(step_check.captured, build, submitting, capturing))  # fmt: skip
            if why:
                self._say(first, "graph", why, "steps are submitted kernel by kernel, more slowly")
                return replace(submitting, try_rows=self.try_rows)
            self.has_graph = True
            if can_overlap and all(parts.can_overlap for parts in self.parts):
                overlapping = made(has_graph=True, kernels=overlapped(self._kernels))
                capturing = self._faster(book, build, capturing, overlapping)
            return replace(capturing, try_rows=self.try_rows)

    def _faster(
        self, book: CheckBook, build: step_check.BuildStep, capturing: Backend, overlapping: Backend
    ) -> Backend:
        """The backend whose kernels overlap, unless its step is wrong or slower."""
        first, part = self.parts[0], f"overlapping launches {self._plan}"
        run = partial(step_check.overlapped, build, capturing, overlapping, first.seconds_of)
        why = self._try(book, first, part, run)
        if why:
            self._say(first, part, why, "a kernel begins when the last one has ended")
        return capturing if why else overlapping

    def _handing_over(self, book: CheckBook, take: Takes | None) -> Callable[..., Backend] | str:
        """Makes backends that hand over to the CPU by flags, or by callbacks where those are missing,
        wrong or slower; the reason why neither works."""
        first = self.parts[0]
        calling = partial(first.backend, take, kernels=self._kernels, has_doorbells=False)
        ringing = partial(calling, has_doorbells=True)
        no_calls = self._try_calls(book, first)
        run = partial(check_doorbell, first, ringing, None if no_calls else calling, PART_S)
        why = self._try(book, first, "doorbell", run)
        if not why:
            return ringing
        if no_calls:
            return f"{_words(first, 'host function')}: {no_calls}; {MORE}"
        self._say(first, "doorbell", why, "the driver calls the CPU for its part of each layer")
        return calling

    def _try_calls(self, book: CheckBook, parts: DeviceParts) -> str:
        backend = parts.backend(None, has_graph=False, kernels=parts.plain_kernels)
        return self._try(
            book, parts, "host function", partial(step_check.echo, backend, parts.device)
        )

    def fits_pass(self, decoder: Decoder, context_length: int, about: str) -> bool:
        """False if the longest pass does not fit into memory at the end of the context. `about`: what
        its memory depends on besides the step."""
        first = self.parts[0]
        tokens = min(decoder.most_tokens, context_length)
        digest = hashlib.sha256(f"{self._plan} {about}".encode()).hexdigest()[:12]
        part = f"passes of {tokens} tokens {digest}"
        with CheckBook(first.key, self.notice) as book:
            known = book.known(part)
            if known is not None:
                return known.is_fine
            began = time.perf_counter()
            why = "" if tokens == 1 or decoder.fits(tokens, context_length) else NO_ROOM
            book.finish(Verdict(part=part, why=why, seconds=time.perf_counter() - began))
        return not why

    def try_rows(self, weights: Weights, num_rows: int, run: Callable[[], None]) -> str:
        """Tries a step of several rows at its first use: its kernels, then `run`. Returns the reason
        why it must not be used, "" if it works. Raises HotsplitError if the device is lost."""
        kernels = partial(self._kernels_of_rows, weights, num_rows)
        then = "steps will have fewer rows"
        return self._try_in_use(f"steps of {num_rows} rows", run, then, kernels)

    def try_pass(self, num_tokens: int, run: Callable[[], None]) -> str:
        """Tries a captured pass of a prompt at its first use, as `try_rows` does."""
        return self._try_in_use(f"graphs of {num_tokens} tokens", run, "prompts will not be graphs")

    def _try_in_use(
        self, name: str, run: Callable[[], None], then: str, before: Callable[[], str] = lambda: ""
    ) -> str:
        try:
            why = before()
            if why:
                return why
            with CheckBook(self.parts[0].key, self.notice) as book:
                return self._try(book, self.parts[0], f"{name} {self._plan}", run, is_in_use=True)
        except DeviceLost as lost:
            raise HotsplitError(f"{lost}; start again, and {then}; {MORE}") from None

    def _kernels_of_rows(self, weights: Weights, num_rows: int) -> str:
        """Checks the kernels of a step of this many rows, but those that torch computes instead.
        Returns why one fails, "" if none does."""
        if self._fast is None or self._launches is None:
            return ""
        launches = [
            each for each in self._launches(weights, num_rows) if each.kernel not in self._replaced
        ]
        for parts, book in self._books():
            for launch in launches:
                if launch.device != parts.device:
                    continue
                run = partial(check_launch, launch, self._fast, parts.plain_kernels, parts.wait)
                why = self._try(book, parts, f"kernel {launch.variant}", run, is_in_use=True)
                if why:
                    return f"{launch.kernel}: {why}"
            parts.free()
        return ""

    def _check_launches(
        self, parts: DeviceParts, book: CheckBook, launches: Sequence[Launch]
    ) -> None:
        """Checks all variants of the kernels; prints a line for each kernel that fails, or one for
        all that fail for the same reason."""
        assert self._fast is not None
        count = sum(book.known(f"kernel {each.variant}") is None for each in launches)
        first: dict[str, tuple[str, str]] = {}  # by kernel: why a variant failed, and which
        with progress("check GPU kernels", max(1, count), "kernels") as advance:
            for launch in launches:
                run = partial(check_launch, launch, self._fast, parts.plain_kernels, parts.wait)
                is_known = book.known(f"kernel {launch.variant}") is not None
                why = self._try(book, parts, f"kernel {launch.variant}", run)
                advance(0 if is_known else 1)
                if why:
                    first.setdefault(launch.kernel, (why, launch.variant))
        self._replace(list(first))
        for reason in dict.fromkeys(why for why, _ in first.values()):
            names = sorted(name for name, (why, _) in first.items() if why == reason)
            part = f"kernels {', '.join(names)}" if names[1:] else f"kernel {first[names[0]][1]}"
            self._say(
                parts, part, reason, "torch computes it, and steps have no graph, which is slower"
            )

    def _check_products(
        self, parts: DeviceParts, book: CheckBook, launches: Sequence[Launch]
    ) -> None:
        """Checks products of prompts in the 16-bit types of the plan's tiles."""
        types = {each.arguments["out_AD"].dtype for each in launches if each.kernel == "unpack"}
        for dtype in sorted(types - {torch.float32}, key=str):
            name = str(dtype).removeprefix("torch.")
            why = self._try(book, parts, f"products {name}", partial(parts.multiply, dtype))
            if why:
                gpu_products.multiply_in_f32(dtype)
                self._say(
                    parts, f"products {name}", why, "prompts are multiplied in f32, more slowly"
                )

    def _replace(self, names: Sequence[str]) -> None:
        self._replaced |= set(names)
        gpu_products.replace_kernels(self._replaced)

    @property
    def _kernels(self) -> Kernels:
        plain = self.parts[0].plain_kernels
        return plain if self._fast is None else mixed(self._fast, plain, self._replaced)

    @property
    def _plan(self) -> str:
        """A short hash of everything that the step launches."""
        text = "\n".join([*self._variants, *sorted(self._replaced)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _books(self) -> Iterator[tuple[DeviceParts, CheckBook]]:
        for parts in self.parts:
            with CheckBook(parts.key, self.notice) as book:
                yield parts, book

    def _try(
        self,
        book: CheckBook,
        parts: DeviceParts,
        part: str,
        run: Callable[[], None],
        *,
        is_last: bool = False,
        is_in_use: bool = False,
    ) -> str:
        """The reason why the part fails, stored or found by running it; "" if it works. With
        `is_last` it does not matter whether the device answers afterwards. `is_in_use`: the part
        shares memory with a step, so nothing else may run before it has ended.

        Raises DeviceLost."""
        known = book.known(part)
        if known is not None:
            return known.why
        book.start(part)
        began = time.perf_counter()
        try:
            why = outcome(run, PART_S, is_waited_for=is_in_use)
        except NotChecked:
            book.give_up()
            self._say(parts, part, "no memory is left to check it", "it is used unchecked")
            return ""
        except BaseException:
            book.give_up()
            raise
        book.finish(Verdict(part=part, why=why, seconds=time.perf_counter() - began))
        is_running = is_in_use and why == too_long(PART_S)
        if is_running or (why and not is_last and outcome(parts.use, ANSWER_S)):
            raise DeviceLost(f"{_words(parts, part)}: {why}, and the device no longer answers")
        return why

    def _say(self, parts: DeviceParts, part: str, why: str, fallback: str) -> None:
        self.notice(f"{_words(parts, part)}: {why}: {fallback}; {MORE}")


def checked(
    devices: Sequence[torch.device], notice: Notice, *, has_budget: bool
) -> DeviceCheck | None:
    """The checks of these devices; None if there is nothing to check, or a device fails."""
    found = [device_parts.parts_of(device) for device in dict.fromkeys(devices)]
    parts = tuple(each for each in found if each is not None)
    if not parts:
        return None
    check = DeviceCheck(parts, notice)
    return check if check.check_devices(has_budget=has_budget) else None


def _words(parts: DeviceParts, part: str) -> str:
    """The device and the part, as users see them."""
    name = name_of_part(part)
    return f"{parts.device}: the {name}" if name != "device" else str(parts.device)
