"""Greetings, questions about the model itself, and saying so when something is out of its reach."""

from __future__ import annotations

import random

from .base import Sample, Split, assistant, casual, draw_until, split_of, user
from .words import NOUNS, made_up_name

SORRY = (
    "I am a small demo model, so I cannot help with that. I can answer questions about TokenMill, do sums, work "
    "with short lists, write JSON, call tools and tell short stories."
)
WHO = (
    "I am the TokenMill demo model, a small language model bundled with TokenMill. I know TokenMill, simple sums, "
    "short lists, JSON, tools and short stories."
)
HELLO = "Hello! I am the TokenMill demo model. What can I do for you?"
THANKS = "You are welcome!"
BYE = "Goodbye!"

TALK: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "hello",
        HELLO,
        (
            "Hello",
            "Hi",
            "Hey",
            "Hi there",
            "Good morning",
            "Good evening",
            "Hello there",
            "Hello!",
            "Hi!",
            "Hey there!",
            "Good day",
            "Greetings",
            "hello",
            "hi",
        ),
    ),
    (
        "thanks",
        THANKS,
        (
            "Thanks",
            "Thank you",
            "Thanks a lot",
            "Thank you very much",
            "Great, thanks",
            "thanks!",
            "Many thanks",
            "Perfect, thank you",
            "Nice, thank you!",
        ),
    ),
    ("bye", BYE, ("Bye", "Goodbye", "See you", "Bye bye", "See you later", "That is all, bye", "Good night")),
    (
        "who",
        WHO,
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "What can you do?",
            "Are you an AI?",
            "Tell me about yourself.",
            "Introduce yourself.",
            "What model are you?",
            "Help",
            "Who am I talking to?",
            "What are you able to do?",
            "Describe yourself.",
            "What kind of model are you?",
            "What do you know?",
            "How can you help me?",
            "Which model is this?",
            "Are you a language model?",
            "Who made you?",
            "What skills do you have?",
            "Can you help me?",
        ),
    ),
)

BEFORE = ("", "", "", "Oh, ", "OK, ", "So, ", "Well, ")
AFTER = {
    "hello": ("", "!", " again", " my friend", ", model", " TokenMill"),
    "thanks": ("", "!", " for your help", " again", ", that helped", ", that is all I need"),
    "bye": ("", "!", " for now", " and take care", ", model", " TokenMill"),
    "who": ("", " please", ", in short", ", really", " exactly", ", model"),
}

TOPICS = (
    "football",
    "the stock market",
    "quantum physics",
    "the history of Rome",
    "politics",
    "cooking rice",
    "the moon landing",
    "black holes",
    "love",
    "the best phone",
    "a job application",
    "my homework",
    "the weather",
    "dinosaurs",
    "the French Revolution",
    "music theory",
    "chess openings",
    "climate change",
    "a trip to Italy",
    "my taxes",
    "the human heart",
    "Shakespearean sonnets",
    "machine learning",
    "the universe",
    "photosynthesis",
    "the largest ocean",
    "a good film",
    "health insurance",
    "a rash on my arm",
    "Python decorators",
    "the news",
    "the meaning of life",
    "a poem about the sea",
    "gardening",
    "horses",
    "the Roman Empire",
    "volcanoes",
    "the capital of France",
    "the tallest mountain",
    "electric cars",
    "banking",
    "marathon training",
    "whales",
    "ancient Greece",
    "the speed of light",
    "a chocolate cake",
    "vitamins",
    "solar panels",
    "baseball",
    "opera",
    "sorting algorithms",
    "Linux kernels",
    "web design",
    "a logo",
    "the lottery numbers",
    "bitcoin",
    "coffee",
)
FRAMES = (
    "Tell me about {t}.",
    "What do you think about {t}?",
    "Explain {t}.",
    "Can you help me with {t}?",
    "Write an essay about {t}.",
    "What is the best thing about {t}?",
    "Give me advice on {t}.",
    "Who invented {t}?",
    "When did {t} begin?",
    "Why is {t} important?",
    "Do you know anything about {t}?",
    "I have a question about {t}.",
    "How does {t} work?",
    "Translate {t} into French.",
    "What should I know about {t}?",
    "Give me ten facts about {t}.",
    "Where can I learn about {t}?",
    "Write a song about {t}.",
    "Who is the most famous person in {t}?",
    "What happened with {t} last year?",
)
OTHERS = (
    "Who is the president?",
    "What is the capital of {n}?",
    "Who won the match between {n} and {m}?",
    "How tall is {n}?",
    "Translate '{w}' into German.",
    "Write a Python program that draws a {w}.",
    "What day is it today?",
    "How old is {n}?",
    "Who wrote the book {n}?",
    "Recommend a restaurant in {n}.",
    "What is the population of {n}?",
    "How do I repair a {w}?",
    "Where can I buy a {w}?",
    "Book a flight to {n}.",
    "What is {a} times {b}?",
    "What is {a} divided by {b}?",
    "What is the square root of {a}?",
    "Draw a picture of a {w}.",
    "Tell me a joke about a {w}.",
    "How do you make a {w}?",
    "Send an email to {n}.",
    "Is a {w} heavier than a {v}?",
    "Why do people like {n}?",
    "What colour is a {w}?",
    "Who is {n}?",
    "Where is {n}?",
    "How far is it from {n} to {m}?",
    "Write a haiku about a {w}.",
    "Summarize the film {n}.",
)


def chat(rng: random.Random, split: Split) -> Sample:
    """A greeting or a question about the model; the wordings themselves are split."""

    def draw() -> tuple[str, tuple[str, str]]:
        kind, answer, texts = rng.choices(TALK, weights=(2, 1, 1, 4))[0]
        text = rng.choice(texts)
        before, after = ("", "") if rng.random() < 0.3 else (rng.choice(BEFORE), rng.choice(AFTER[kind]))
        if after and text[-1] in ".?!":
            text, after = text[:-1], f"{after}{text[-1]}"
        return f"chat:{before}{text}{after}".lower(), (f"{before}{text}{after}", answer)

    # A bare greeting has no second wording to learn it from, so the bare texts are always in training.
    while True:
        key, (text, answer) = draw()
        part = (
            "train" if any(key == f"chat:{bare}".lower() for _, _, texts in TALK for bare in texts) else split_of(key)
        )
        if part == split:
            break
    return Sample("about itself", key, (user(casual(rng, text)), assistant(answer)))


def beyond(rng: random.Random, split: Split) -> Sample:
    """Something the model was not made for: it says so, and says what it can do."""

    def draw() -> tuple[str, str]:
        if rng.random() < 0.5:
            text = rng.choice(FRAMES).format(t=rng.choice(TOPICS))
        else:
            fills = {
                "n": made_up_name(rng),
                "m": made_up_name(rng),
                "w": rng.choice(NOUNS),
                "v": rng.choice(NOUNS),
                "a": rng.randint(2, 999),
                "b": rng.randint(2, 99),
            }
            text = rng.choice(OTHERS).format(**fills)
        return f"scope:{text}", text

    key, text = draw_until(split, draw)
    return Sample("out of scope", key, (user(casual(rng, text)), assistant(SORRY)))
