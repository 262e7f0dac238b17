"""Runs of blocks say the same as blocks one by one."""

import random
from collections import OrderedDict

import pytest

from loadtests.colocation.virtual.blocks import BLOCK, ENDLESS, Blocks, Part


class _OneByOne:
    """What `Blocks` stands for, written plainly: every block by name, free ones oldest first."""

    def __init__(self, total):
        self.total = total
        self.holders = {}
        self.readable = set()
        self.free = OrderedDict()

    def names(self, chain, blocks):
        return [(key, at) for key, first, last in chain for at in range(first, min(last, blocks))]

    def hit(self, chain, tokens):
        found = 0
        for name in self.names(chain, tokens // BLOCK):
            if name not in self.readable:
                break
            found += 1
        return found * BLOCK

    def held(self):
        return {name for names in self.holders.values() for name in names}

    def hold(self, who, chain, blocks):
        names = self.names(chain, blocks)
        for name in names:
            self.free.pop(name, None)
        self.holders[who] = names
        while len(self.free) + len(self.held()) > self.total:
            self.readable.discard(self.free.popitem(last=False)[0])

    def filled(self, chain, tokens):
        self.readable.update(self.names(chain, tokens // BLOCK))

    def drop(self, who, chain, tokens):
        self.filled(chain, tokens)
        names, held = self.holders.pop(who), self.held()
        for name in reversed(names):
            if name not in held and name in self.readable:
                self.free[name] = None


@pytest.mark.parametrize("seed", range(20))
def test_the_same_hits_and_the_same_room(seed):
    dice = random.Random(seed)
    blocks, plain = Blocks(40), _OneByOne(40)
    chains = _family(dice)
    running = {}
    for _ in range(300):
        who = dice.randrange(len(chains))
        chain = chains[who]
        if who not in running:
            want = dice.randrange(1, 12)
            assert blocks.hit(chain, want * BLOCK) == plain.hit(chain, want * BLOCK)
            assert blocks.cost(chain, want) == len(set(plain.names(chain, want)) - plain.held())
            if blocks.cost(chain, want) <= blocks.free:
                blocks.hold(who, chain, want)
                plain.hold(who, chain, want)
                running[who] = want
        elif dice.random() < 0.5:
            done = dice.randrange(running[who] * BLOCK + 1)
            blocks.filled(chain, done)
            plain.filled(chain, done)
        else:
            done = running.pop(who) * BLOCK
            blocks.drop(who, chain, done)
            plain.drop(who, chain, done)
        assert blocks.held == len(plain.held())
        assert 0 <= blocks.banded <= blocks.free


def _family(dice):
    """Prompts of which some begin like an earlier one."""
    chains = []
    for name in range(8):
        shared = ()
        if chains and dice.random() < 0.6:
            end = dice.randrange(1, 8)
            parent = dice.choice(chains)
            shared = tuple(Part(key, first, min(last, end)) for key, first, last in parent if first < end)
        start = shared[-1].last if shared else 0
        chains.append((*shared, Part(name, start, ENDLESS)))
    return chains


def test_of_a_prompt_the_last_block_goes_first_and_of_prompts_the_oldest():
    blocks = Blocks(10)
    old, new, third = ((Part(name, 0, ENDLESS),) for name in ("old", "new", "third"))
    for who, chain in (("old", old), ("new", new)):
        blocks.hold(who, chain, 5)
        blocks.drop(who, chain, 5 * BLOCK)
    blocks.hold("third", third, 2)
    assert blocks.hit(old, 5 * BLOCK) == 3 * BLOCK
    assert blocks.hit(new, 5 * BLOCK) == 5 * BLOCK


def test_blocks_that_were_not_filled_are_not_read_again():
    blocks = Blocks(10)
    chain = (Part("x", 0, ENDLESS),)
    blocks.hold("x", chain, 5)
    blocks.drop("x", chain, 2 * BLOCK + 3)
    assert blocks.hit(chain, 5 * BLOCK) == 2 * BLOCK
    assert blocks.free == 10
