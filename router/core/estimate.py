"""Learns, for each model, what a count is worth and how long answers are.

A count is made with one vocabulary for all models; `usage` says what the model's own tokenizer made of it. Three things
are learnt from it, each over the recent past:

    ratio     real tokens / counted, weighted by size, so that a template's fixed cost does not distort short prompts
    upper     the 0.99 quantile of the ratios of prompts long enough to be worth a ratio
    output    the 0.9 quantile of answers that ended by themselves

Use `prompt` to tell the class and reserve room, and to refuse; `upper` to choose a node whose context must hold.
"""

from collections import OrderedDict

from router.core.call import Usage
from router.core.recent import Recent

__all__ = ["Estimate", "Estimates"]

HISTORY = 256
ENOUGH = 8
OUTPUT_UNKNOWN = 512
OUTPUT_QUANTILE = 0.9
RATIO_QUANTILE = 0.99
MARGIN_UNKNOWN = 1.15  # other vocabularies were 3 to 15 % above cl100k_base on Latin text in field reports
KEEP = 0.98  # a sample loses half its weight in 34 calls
PRIOR_TOKENS = 256.0
SAMPLE_TOKENS = 8192  # a longer prompt weighs no more than this
RATIO_FROM = 256  # counted tokens; below it the template's fixed cost rules
RATIO_RANGE = (0.1, 10.0)  # outside it something else was counted
MOST = 2**31 - 1


class Estimate:
    """What is known of one model. Pure; not for several threads.

    `ratio` is the model's own tokens for one counted token, `upper_ratio` what hardly any prompt is above.
    """

    __slots__ = ("_counted", "_outputs", "_ratios", "_real", "_usual", "ratio", "upper_ratio")

    def __init__(self) -> None:
        self._counted = self._real = PRIOR_TOKENS
        self._ratios = Recent(HISTORY)
        self._outputs = Recent(HISTORY)
        self.ratio = 1.0
        self.upper_ratio = MARGIN_UNKNOWN
        self._usual: int | None = OUTPUT_UNKNOWN  # None: to be worked out when it is asked for

    def learn(self, counted: int, usage: Usage, asked: int | None) -> None:
        """Take in one finished call: our count, the node's, and the caller's limit of output.

        `usage.completion` is of one sequence. Numbers that cannot be true are passed over; so is an answer cut by
        `asked`, which says nothing of how long it would have been. Leave out bodies with media, whose count is a guess.
        """
        if counted > 0 and RATIO_RANGE[0] <= usage.prompt / counted <= RATIO_RANGE[1]:
            self._learn_ratio(counted, usage.prompt)
        completion = usage.completion
        if 0 < completion <= MOST and (asked is None or completion < asked):
            self._outputs.add(completion)
            self._usual = None

    def _learn_ratio(self, counted: int, real: int) -> None:
        weight = min(1.0, SAMPLE_TOKENS / counted)
        self._counted = self._counted * KEEP + counted * weight
        self._real = self._real * KEEP + real * weight
        if counted >= RATIO_FROM:
            self._ratios.add(real / counted)
        self.ratio = self._real / self._counted
        if len(self._ratios) < ENOUGH:
            self.upper_ratio = self.ratio * MARGIN_UNKNOWN
        else:
            self.upper_ratio = max(self.ratio, self._ratios.quantile(RATIO_QUANTILE))

    def prompt(self, counted: int) -> int:
        """The expected length of a prompt in the model's own tokens."""
        return round(counted * self.ratio)

    def upper(self, counted: int) -> int:
        """A length that hardly any prompt of this count is above."""
        return round(counted * self.upper_ratio)

    def output(self, asked: int | None) -> int:
        """The most tokens one sequence is expected to give: as asked, else what nine answers in ten stayed within."""
        if asked is not None:
            return asked
        if self._usual is None:
            enough = len(self._outputs) >= ENOUGH
            self._usual = int(self._outputs.quantile(OUTPUT_QUANTILE)) if enough else OUTPUT_UNKNOWN
        return self._usual


class Estimates:
    """An Estimate for each of the `most` models used last.

    The order of use is kept once there are so many: while none has to go, it decides nothing.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._full = False
        self._models: OrderedDict[str, Estimate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._models)

    def of(self, model: str) -> Estimate:
        """The model's Estimate, new if it was not known or has been forgotten."""
        estimate = self._models.get(model)
        if estimate is None:
            return self._new(model)
        if self._full:
            self._models.move_to_end(model)
        return estimate

    def _new(self, model: str) -> Estimate:
        estimate = self._models[model] = Estimate()
        if self._full:
            self._models.popitem(last=False)
        self._full = len(self._models) >= self._most
        return estimate
