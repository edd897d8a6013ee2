"""Words of the synthetic world, and the rule that keeps some of them out of training.

Names, towns, (adjective, place) pairs and finds (an object in a colour at a place) whose checksum falls in one eighth
of the range never occur in training documents. Evaluation can draw exactly those. Everything in this module is a
constant or a pure function of the given random generator.
"""

# ruff: noqa: SIM905 - long word lists read better as text that is split

from __future__ import annotations

from itertools import count
from random import Random
from zlib import crc32

NAMES = (
    "Ada Alice Amir Anna Anton Arlo Asha Ben Bella Bob Boris Carl Carla Chen Clara Cora Dan Dana David Della "
    "Diego Dora Edgar Elena Eli Ella Emil Emma Erik Esra Eva Ezra Fatima Felix Fiona Flora Frank Frida Gina "
    "Gita Grace Greta Hana Hanna Harry Hassan Hector Heidi Henry Hugo Ida Igor Ines Iris Ivan Jack Jana Jane "
    "Jasper Joan John Jonas Julia Kai Karim Karl Kate Kemal Kira Klara Kofi Lara Lena Leo Lila Lina Lisa Lola "
    "Lucas Lucy Luis Luna Mara Marco Maria Mark Martha Mary Max Maya Mia Mila Mina Mira Nadia Nico Nils Nina "
    "Noah Nora Olaf Olga Oliver Omar Oscar Otto Pablo Paul Paula Pedro Peter Petra Pia Rafael Rana Rashid Rita "
    "Robin Rosa Ruby Ruth Sam Sana Sara Selma Simon Sofia Stella Sven Tara Theo Tim Tina Tom Tomas Uma Ursula "
    "Vera Victor Viola Wanda Will Yara Yuki Yusuf Zara Zoe"
).split()
# In stories that the model will tell: frequent names first, each with another initial.
COMMON_NAMES = (
    "Mira Tom Anna Leo Grace Ben Clara Noah Emma Hugo Rosa Jack Vera Paul Ella David Lucy Felix Kate Sofia Olga "
    "Ruby Peter Uma Yuki Zoe Iris"
).split()
PET_NAMES = (
    "Pico Fifi Toto Bobo Coco Lulu Momo Kiki Tiko Zuzu Didi Vivi Gigi Hobo Jojo Yoyo Sisu Elfi".split()
)
ONSETS = "b bl br c ch d dr f fl fr g gl gr h j k kl l m n p ph pl pr q qu r s sh sk sl st t th tr v w x y z".split()
VOWELS = "a e i o u a e i o u ai ee ia io oa ou y".split()
CODAS = ["", "", "", "", "n", "l", "r", "s", "m", "k", "x", "nd", "rt", "th", "sh", "ck", "d", "b"]

TOWN_HEADS = (
    "Oak Ash Elm Birch Stone River Lake Mill Fox Crow Swan Wolf Red White Black Green Silver Winter Summer "
    "Spring North South East West High Low Long Bright Clear Deep Apple Cherry Honey Salt Sand Wind"
).split()
TOWN_TAILS = "ford ton ville field bridge brook dale haven wick mouth hill stead port wood bury well".split()

PLACES = (
    (
        "mill market library bakery harbour school park bridge lake station castle garden farm lighthouse museum "
        "pond inn chapel tower well river beach cinema theatre fountain zoo playground barn pool windmill boathouse "
        "greenhouse campsite waterfall quarry vineyard stable cottage palace temple workshop shop cafe hospital "
        "church circus factory gallery gym hotel theme-park bus-stop post-office town-hall"
    )
    .replace("-", "_")
    .split()
)
PLACE_WORDS = ["", "", "old", "new", "little", "big", "quiet", "busy", "famous", "empty"]

COLOURS = "red blue green yellow purple orange pink white black brown grey silver golden".split()
OBJECTS = (
    "kite lamp key book drum ring hat coat box map bell cup clock boat basket blanket brush bucket button "
    "candle chair coin comb compass crown doll feather flute fork glove guitar hammer jar kettle ladder lantern "
    "mask mirror mug needle notebook pen pillow plate pot purse ribbon rope saddle scarf shell spoon stone "
    "teapot telescope ticket torch trumpet umbrella vase violin wallet watch wheel whistle"
).split()
GOODS = (
    "apples pears plums lemons eggs buns biscuits carrots potatoes onions tomatoes peaches cherries nuts marbles "
    "stickers stamps beads cards pencils balloons seeds roses tulips pies sweets oranges shirts socks bottles"
).split()
NOT_EATEN = frozenset(
    "marbles stickers stamps beads cards pencils balloons seeds roses tulips shirts socks bottles".split()
)
JOBS = (
    "baker farmer teacher doctor painter sailor gardener carpenter tailor nurse singer dancer writer cook "
    "driver pilot fisher shepherd blacksmith clockmaker librarian postman actor artist engineer inventor "
    "architect judge miner potter"
).split()
ANIMALS = "dog cat rabbit parrot pony goat hamster turtle duck lamb hen mouse owl frog donkey goose".split()
ANIMAL_COLOURS = "red green yellow orange white black brown grey golden spotted".split()
FOODS = (
    "soup,bread,cheese,pancakes,noodles,rice,honey,chocolate,pizza,porridge,salad,fish,pasta,dumplings,"
    "strawberries,mushrooms,ice cream,apple pie,roast potatoes,fried eggs"
).split(",")
HIDING = (
    "under the bed,behind the door,in the cupboard,on the shelf,under the table,in a drawer,behind the curtain,"
    "on the roof,under a tree,behind a rock,in the cellar,in the attic,under the stairs,on the windowsill,"
    "behind the stove,in an old chest"
).split(",")
FEELINGS = (
    "happy sad proud tired hungry brave lonely excited calm worried grateful cold sleepy curious".split()
)
WEATHER = "rainy sunny windy cloudy snowy foggy stormy warm cold misty".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def held_out(text: str) -> bool:
    """Return whether a name or pair of words is reserved for evaluation."""
    return crc32(text.encode()) % 8 == 0


def with_article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def number_text(rng: Random, n: int) -> str:
    """Write a number as in a story: small ones mostly in words."""
    return NUMBER_WORDS[n] if n <= 12 and rng.random() < 0.7 else str(n)


def join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def composed_name(rng: Random) -> str:
    syllables = 2 if rng.random() < 0.6 else 3
    text = ""
    for i in range(syllables):
        onset = rng.choice(ONSETS) if i or rng.random() < 0.8 else ""
        coda = rng.choice(CODAS) if i == syllables - 1 or rng.random() < 0.3 else ""
        text += onset + rng.choice(VOWELS) + coda
    return text.capitalize()


class Pool:
    """The words of one document, each drawn at most once, so that a question has one answer.

    `new_names` selects held-out names, `new_pairs` held-out towns, pairs and finds.
    """

    def __init__(self, rng: Random, new_names: bool = False, new_pairs: bool = False) -> None:
        self.rng = rng
        self.new_names = new_names
        self.new_pairs = new_pairs
        self.used: set[str] = set()
        self.common = 0.2 if new_names else 0.6  # share of names from the list, not composed
        self.tidy = (
            False  # for a story that the model tells: names, places and objects that are easy to tell apart
        )
        self.initials: set[str] = set()

    def _fresh(self, text: str, key: str, new: bool) -> bool:
        if key in self.used or held_out(text) != new:
            return False
        self.used.add(key)
        return True

    def name(self) -> str:
        while True:
            if self.tidy and self.rng.random() < 0.85:
                name = COMMON_NAMES[int(len(COMMON_NAMES) * self.rng.random() ** 2)]
            else:
                listed = self.rng.random() < self.common
                name = self.rng.choice(NAMES) if listed else composed_name(self.rng)
            if not (self.tidy and name[0] in self.initials) and self._fresh(name, name, self.new_names):
                self.initials.add(name[0])
                return name
            if self.new_names:
                self.common *= 0.95  # the listed held-out names are few; never wait for them

    def pet(self) -> str:
        for _ in range(9 * self.tidy):
            name = self.rng.choice(PET_NAMES)
            if name[0] not in self.initials and self._fresh(name, name, self.new_names):
                self.initials.add(name[0])
                return name
        return self.name()

    def town(self) -> str:
        while True:
            made_up = self.rng.random() < 0.3 and not self.tidy
            town = (
                composed_name(self.rng)
                if made_up
                else self.rng.choice(TOWN_HEADS) + self.rng.choice(TOWN_TAILS)
            )
            if self._fresh(town, town, self.new_pairs):
                return town

    def place(self) -> str:
        for attempt in count():
            noun = self.rng.choice(PLACES)
            word = self.rng.choice(PLACE_WORDS)
            if self.tidy and word in self.used and attempt < 20:
                continue
            phrase = f"the {word} {noun}" if word else f"the {noun}"
            # A long document may run out of nouns; then another word for the same noun will do.
            key = noun if attempt < 40 else phrase
            # A bare noun is one word, not a pair, so it may occur on both sides.
            if phrase not in self.used and self._fresh(
                phrase, key, self.new_pairs if word else held_out(phrase)
            ):
                self.used |= {phrase, word} - {""}
                return phrase.replace("_", " ")
        raise AssertionError

    def thing(self, place: str = "") -> tuple[str, str]:
        """Draw the (colour, noun) of an object; with `place`, one whose find there obeys `new_pairs`."""
        while True:
            colour, noun = self.rng.choice(COLOURS), self.rng.choice(OBJECTS)
            if self.tidy and colour in self.used:
                continue
            if noun not in self.used and (not place or self.allows(colour, noun, place)):
                self.used |= {noun, colour}
                return colour, noun

    def allows(self, colour: str, noun: str, place: str) -> bool:
        return held_out(f"{colour} {noun} at {place}") == self.new_pairs

    def goods(self) -> str:
        while True:
            goods = self.rng.choice(GOODS)
            if goods not in self.used:
                self.used.add(goods)
                return goods
