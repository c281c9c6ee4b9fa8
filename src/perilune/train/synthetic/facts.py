"""A few hundred simple facts from small tables, asked in several ways."""

from __future__ import annotations

import random

from perilune.train.synthetic.chat import Chat, exchange

_COUNTRIES = """France|Paris|Europe|French
Spain|Madrid|Europe|Spanish
Italy|Rome|Europe|Italian
Germany|Berlin|Europe|German
Japan|Tokyo|Asia|Japanese
China|Beijing|Asia|Chinese
India|New Delhi|Asia|Hindi and English, among many others
Brazil|Brasilia|South America|Portuguese
Canada|Ottawa|North America|English and French
Mexico|Mexico City|North America|Spanish
Egypt|Cairo|Africa|Arabic
Kenya|Nairobi|Africa|Swahili and English
Norway|Oslo|Europe|Norwegian
Sweden|Stockholm|Europe|Swedish
Poland|Warsaw|Europe|Polish
Greece|Athens|Europe|Greek
Turkey|Ankara|Europe and Asia|Turkish
Peru|Lima|South America|Spanish
Chile|Santiago|South America|Spanish
Australia|Canberra|Oceania|English
Ireland|Dublin|Europe|English and Irish
Portugal|Lisbon|Europe|Portuguese
Vietnam|Hanoi|Asia|Vietnamese
Thailand|Bangkok|Asia|Thai
Argentina|Buenos Aires|South America|Spanish
Austria|Vienna|Europe|German
Denmark|Copenhagen|Europe|Danish
Finland|Helsinki|Europe|Finnish and Swedish
Hungary|Budapest|Europe|Hungarian
Iceland|Reykjavik|Europe|Icelandic
Russia|Moscow|Europe and Asia|Russian
South Korea|Seoul|Asia|Korean
the United Kingdom|London|Europe|English
the United States|Washington, D.C.|North America|English
the Netherlands|Amsterdam|Europe|Dutch
Cuba|Havana|North America|Spanish
Morocco|Rabat|Africa|Arabic and Berber
New Zealand|Wellington|Oceania|English and Maori
Belgium|Brussels|Europe|Dutch, French and German
the Czech Republic|Prague|Europe|Czech"""
_ANIMALS = """dog|meat and dog food|in houses with people|4|bark
cat|meat and fish|in houses with people|4|meow
horse|grass and hay|on farms and in open fields|4|neigh
cow|grass and hay|on farms|4|moo
lion|meat|in the grasslands of Africa|4|roar
tiger|meat|in the forests of Asia|4|roar
elephant|leaves, grass and fruit|in Africa and Asia|4|trumpet
mouse|seeds and grain|in fields and houses|4|squeak
rabbit|grass, leaves and vegetables|in burrows under the ground|4|
bear|berries, fish and meat|in forests and mountains|4|growl
wolf|meat|in forests, in groups called packs|4|howl
fox|small animals and berries|in dens in forests and fields|4|
frog|insects|in ponds and wet places|4|croak
snake|small animals|in forests, deserts and fields|0|hiss
bee|nectar and pollen|in hives|6|buzz
ant|seeds and other insects|in nests under the ground|6|
spider|insects|in webs, gardens and houses|8|
duck|water plants and insects|on ponds and lakes|2|quack
chicken|grain and insects|on farms|2|cluck
sheep|grass|on farms and hills|4|bleat
goat|grass and leaves|on farms and in mountains|4|bleat
whale|small sea animals and fish|in the ocean|0|
shark|fish and other sea animals|in the ocean|0|
fish|small plants and animals in the water|in water|0|
bird|seeds, insects and fruit|in nests in trees|2|sing"""
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = (
    "January February March April May June July August September October November December".split()
)
_MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_SEASONS = "spring summer autumn winter".split()
_OPPOSITES = (
    "hot cold|big small|up down|fast slow|old young|happy sad|open closed|light dark|high low|"
    "wet dry|full empty|hard soft|early late|rich poor|strong weak|near far|loud quiet|clean dirty|"
    "left right|day night|good bad|long short|thick thin|sweet sour|first last|true false|"
    "buy sell|begin end|push pull|win lose|laugh cry|arrive leave|remember forget|give take"
)
_PLURALS = (
    "cat cats|dog dogs|box boxes|child children|man men|woman women|foot feet|tooth teeth|mouse mice|"
    "city cities|baby babies|leaf leaves|knife knives|sheep sheep|fish fish|bus buses|glass glasses|"
    "goose geese|story stories|potato potatoes|wolf wolves|book books|person people|watch watches"
)
_PASTS = (
    "go went|see saw|eat ate|run ran|write wrote|take took|give gave|come came|make made|buy bought|"
    "think thought|bring brought|find found|know knew|swim swam|sing sang|drink drank|speak spoke|"
    "walk walked|play played|try tried|sleep slept|teach taught|read read|begin began|fly flew"
)
_SIMPLE = """Why is the sky blue?|Air scatters blue light more than red light, so blue light reaches us from every part of the sky.
What is water made of?|Water is made of hydrogen and oxygen. Each molecule has two hydrogen atoms and one oxygen atom.
How do plants grow?|Plants take in light, water and carbon dioxide. With the energy of the light they make sugar, and they use it to grow.
Why do we sleep?|Sleep lets the body rest and repair itself, and it helps the brain to store what we learned.
What is the sun?|The sun is a star. It is a very hot ball of gas that gives the Earth light and warmth.
What is the moon?|The moon is a ball of rock that goes around the Earth about once a month.
How many minutes are in an hour?|There are 60 minutes in an hour.
How many hours are in a day?|There are 24 hours in a day.
How many seconds are in a minute?|There are 60 seconds in a minute.
How many days are in a week?|There are seven days in a week.
How many days are in a year?|A year has 365 days. A leap year has 366.
How many months are in a year?|There are twelve months in a year.
How many planets are in the solar system?|There are eight planets in the solar system.
What is the largest planet?|Jupiter is the largest planet of the solar system.
What is the largest ocean?|The Pacific Ocean is the largest ocean.
At what temperature does water freeze?|Water freezes at 0 degrees Celsius.
At what temperature does water boil?|At sea level water boils at 100 degrees Celsius.
What do bees make?|Bees make honey.
What is ice?|Ice is frozen water.
How many legs does an insect have?|An insect has six legs.
How many letters are in the English alphabet?|There are 26 letters in the English alphabet.
Which colours make green?|Blue and yellow make green.
Which colours make orange?|Red and yellow make orange.
Which colours make purple?|Red and blue make purple.
How many sides does a triangle have?|A triangle has three sides.
How many sides does a square have?|A square has four equal sides.
Who wrote Romeo and Juliet?|William Shakespeare wrote Romeo and Juliet.
Who wrote Hamlet?|William Shakespeare wrote Hamlet.
What is a computer?|A computer is a machine that follows instructions to work with data.
What is Python?|Python is a programming language that is known for simple, readable code.
What is bread made of?|Bread is made of flour, water, salt and usually yeast.
What is cheese made of?|Cheese is made of milk.
What is honey made of?|Bees make honey from the nectar of flowers.
What is chocolate made of?|Chocolate is made of cocoa beans, usually with sugar and milk.
What is glass made of?|Glass is made mostly of sand that is melted at high heat.
What is paper made of?|Paper is made of wood fibres.
Tell me a joke.|Why did the student eat his homework? Because the teacher said it was a piece of cake!
Tell me a joke.|Why do bees have sticky hair? Because they use honeycombs!
Tell me a joke.|What do you call a bear without teeth? A gummy bear!
Tell me a joke.|Why was the maths book sad? It had too many problems.
Tell me a joke.|What kind of tree fits in your hand? A palm tree!
Tell me a joke.|Why did the bicycle fall over? It was two-tired!"""


def _rows(table: str) -> list[list[str]]:
    return [line.split("|") for line in table.splitlines()]


def draw_country(rng: random.Random) -> Chat:
    name, capital, continent, language = rng.choice(_rows(_COUNTRIES))
    title = name[0].upper() + name[1:]
    return rng.choice(
        (
            exchange(f"What is the capital of {name}?", f"The capital of {name} is {capital}."),
            exchange(f"Which city is the capital of {name}?", f"{capital} is the capital of {name}."),
            exchange(f"What language do people speak in {name}?", f"In {name} people speak {language}."),
            exchange(f"Where is {name}?", f"{title} is in {continent}."),
            exchange(f"{capital} is the capital of which country?", f"{capital} is the capital of {name}."),
        )
    )


def draw_animal(rng: random.Random) -> Chat:
    name, food, home, legs, sound = rng.choice(_rows(_ANIMALS))
    a = "an" if name[0] in "aeiou" else "a"
    title = f"{a} {name}".capitalize()
    number = "no legs" if legs == "0" else f"{legs} legs"
    choices = [
        exchange(f"What does {a} {name} eat?", f"{title} eats {food}."),
        exchange(f"Where does {a} {name} live?", f"{title} lives {home}."),
        exchange(f"How many legs does {a} {name} have?", f"{title} has {number}."),
    ]
    if sound:
        choices.append(exchange(f"What sound does {a} {name} make?", f"The sound of {a} {name} is called: {sound}."))
    return rng.choice(choices)


def _neighbour(rng: random.Random, unit: str, names: list[str]) -> Chat:
    i, step = rng.randrange(len(names)), rng.choice((1, -1))
    word = "after" if step == 1 else "before"
    other = names[(i + step) % len(names)]
    title = other[0].upper() + other[1:]
    return exchange(f"What {unit} comes {word} {names[i]}?", f"{title} comes {word} {names[i]}.")


def draw_calendar(rng: random.Random) -> Chat:
    kind = rng.randrange(4)
    if kind == 0:
        return _neighbour(rng, "day", _DAYS)
    if kind == 1:
        return _neighbour(rng, "month", _MONTHS)
    if kind == 2:
        return _neighbour(rng, "season", _SEASONS)
    i = rng.randrange(12)
    days = f"{_MONTH_DAYS[i]} days" + (", and 29 in a leap year" if i == 1 else "")
    return exchange(f"How many days does {_MONTHS[i]} have?", f"{_MONTHS[i]} has {days}.")


def _pair(rng: random.Random, table: str) -> tuple[str, str]:
    first, second = rng.choice(table.split("|")).split()
    return first, second


def draw_grammar(rng: random.Random) -> Chat:
    kind = rng.randrange(3)
    if kind == 0:
        pair = list(_pair(rng, _OPPOSITES))
        rng.shuffle(pair)
        return exchange(f"What is the opposite of {pair[0]}?", f"The opposite of {pair[0]} is {pair[1]}.")
    if kind == 1:
        one, many = _pair(rng, _PLURALS)
        return exchange(f"What is the plural of {one}?", f"The plural of {one} is {many}.")
    now, past = _pair(rng, _PASTS)
    return exchange(f"What is the past tense of {now}?", f"The past tense of {now} is {past}.")


def draw_simple(rng: random.Random) -> Chat:
    question, answer = rng.choice(_rows(_SIMPLE))
    return exchange(question, answer)
