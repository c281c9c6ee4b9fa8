"""Finding a value in the context: keys in a list, facts in a paragraph, something said before."""

from __future__ import annotations

import random

from perilune.train.synthetic.chat import Chat, assistant, exchange, user
from perilune.train.synthetic.words import WORDS, listed

NAMES = listed(
    "Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam "
    "Tina Umar Vera Will Xenia Yara Zoe Adam Bella Carl Dora Erik Fiona George Hannah Ivan "
    "Julia"
)
CITIES = listed(
    "Paris London Rome Berlin Madrid Oslo Tokyo Cairo Lima Dublin Vienna Athens Lisbon Prague "
    "Delhi Sydney Toronto Boston Chicago Warsaw Helsinki Nairobi Seoul Hanoi Geneva Havana "
    "Kyoto Porto"
)
JOBS = listed("teacher doctor baker farmer pilot painter nurse writer singer cook driver tailor")
COLOURS = listed("red blue green yellow black white brown purple pink orange grey")
_FILLER = (
    "The weather was mild that week.",
    "Nobody was in a hurry.",
    "The old clock in the hall kept ticking.",
    "A light rain fell in the morning.",
    "The shop on the corner was closed.",
    "Later they all sat down for tea.",
    "The road to the village was quiet.",
    "A dog barked somewhere far away.",
    "The train was late again.",
    "There were fresh flowers on the table.",
    "The children played in the yard.",
    "Dinner was ready at seven.",
    "The lights went out for a minute.",
    "Everyone agreed that it had been a good day.",
)


def draw_keys(rng: random.Random) -> Chat:
    keys = rng.sample(WORDS, rng.randint(3, 14))
    number = rng.random() < 0.5
    values = [str(rng.randint(1, 999)) if number else rng.choice(WORDS) for _ in keys]
    separator = rng.choice((": ", " = ", " -> "))
    lines = "\n".join(key + separator + value for key, value in zip(keys, values, strict=True))
    i = rng.randrange(len(keys))
    question = rng.choice(
        ("What is the value of {k}?", "Which value belongs to {k}?", "Look up {k} in the list.")
    ).format(k=keys[i])
    text = f"{lines}\n\n{question}" if rng.random() < 0.7 else f"{question}\n\n{lines}"
    answer = values[i] if rng.random() < 0.5 else f"The value of {keys[i]} is {values[i]}."
    return exchange(text, answer)


def draw_needle(rng: random.Random) -> Chat:
    """A paragraph about several people; the question is about one of them."""
    people = rng.sample(NAMES, rng.randint(2, 5))
    facts = []
    for name in people:
        kind = rng.randrange(5)
        city, job, colour = rng.choice(CITIES), rng.choice(JOBS), rng.choice(COLOURS)
        word, age = rng.choice(WORDS), rng.randint(5, 90)
        article = "an" if word[0] in "aeiou" else "a"
        facts.append(
            (
                (
                    f"{name} lives in {city}.",
                    f"Where does {name} live?",
                    f"{name} lives in {city}.",
                ),
                (f"{name} works as a {job}.", f"What is {name}'s job?", f"{name} is a {job}."),
                (
                    f"{name} likes the colour {colour}.",
                    f"Which colour does {name} like?",
                    f"{name} likes {colour}.",
                ),
                (
                    f"{name} is {age} years old.",
                    f"How old is {name}?",
                    f"{name} is {age} years old.",
                ),
                (
                    f"{name} carries {article} {word}.",
                    f"What does {name} carry?",
                    f"{name} carries {article} {word}.",
                ),
            )[kind]
        )
    sentences = [fact[0] for fact in facts] + rng.sample(_FILLER, rng.randint(1, 9))
    rng.shuffle(sentences)
    _, question, answer = rng.choice(facts)
    intro = rng.choice(("Read this text: ", "Text: ", "", "Here is a short text. "))
    return exchange(f"{intro}{' '.join(sentences)}\n\n{question}", answer)


def draw_memory(rng: random.Random) -> Chat:
    """The user says something about themselves, talks on, and asks for it later."""
    name, city, colour = rng.choice(NAMES), rng.choice(CITIES), rng.choice(COLOURS)
    number, pet = rng.randint(1, 99), rng.choice(("cat", "dog", "bird", "rabbit", "horse"))
    said, noted, question, answer = rng.choice(
        (
            (
                f"My name is {name}.",
                f"Nice to meet you, {name}!",
                "What is my name?",
                f"Your name is {name}.",
            ),
            (
                f"Hi, I'm {name} and I live in {city}.",
                f"Hello {name}! {city} sounds like a nice place.",
                "Where do I live?",
                f"You live in {city}.",
            ),
            (
                f"My favourite colour is {colour}.",
                f"{colour.capitalize()} is a lovely colour.",
                "What is my favourite colour?",
                f"Your favourite colour is {colour}.",
            ),
            (
                f"Remember the number {number}.",
                f"Okay, I will remember {number}.",
                "Which number did I give you?",
                f"You gave me the number {number}.",
            ),
            (
                f"I have a {pet} called {name}.",
                f"{name} is a lovely name for a {pet}.",
                f"What is the name of my {pet}?",
                f"Your {pet} is called {name}.",
            ),
        )
    )
    messages = [user(said), assistant(noted)]
    if rng.random() < 0.6:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        between = rng.choice(
            (
                (f"What is {a} + {b}?", f"{a} + {b} = {a + b}"),
                ("Thank you.", "You're welcome!"),
                ("Say the word " + rng.choice(WORDS) + ".", ""),
                ("I am a bit tired today.", "I'm sorry to hear that. A short rest may help."),
                ("The weather is nice today.", "That's good to hear! Enjoy the day."),
            )
        )
        reply = between[1] or between[0].removeprefix("Say the word ").rstrip(".")
        messages += [user(between[0]), assistant(reply)]
    return Chat((*messages, user(question), assistant(answer)))
