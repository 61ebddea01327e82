"""Greetings, small talk and questions about the model itself."""

from __future__ import annotations

import random

from .base import Sample, Split, assistant, casual, split_of, user

WHO = (
    "I am the TokenMill demo model, a small language model bundled with TokenMill. I know TokenMill, simple sums, "
    "short lists, JSON, tools and short stories."
)
HELLO = "Hello! I am the TokenMill demo model. What can I do for you?"
THANKS = "You are welcome!"
BYE = "Goodbye!"
WELL = "I am well, thank you. What can I do for you?"
MORE = "What else can I do for you?"
PRAISE = "Thank you, that is kind."

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
            "hey there",
            "yo",
            "Hiya",
            "Howdy",
            "Good afternoon",
            "hello world",
            "Anybody there?",
            "Are you there?",
        ),
    ),
    (
        "well",
        WELL,
        (
            "How are you?",
            "How are you today?",
            "How are you doing?",
            "How is it going?",
            "How's it going?",
            "How do you do?",
            "What's up?",
            "Are you well?",
            "How do you feel?",
            "How is your day?",
            "Hi, how are you?",
            "Hello, how are you?",
        ),
    ),
    (
        "more",
        MORE,
        ("OK", "Okay", "Good", "Nice", "Fine", "I see", "Alright", "Got it", "Understood", "Right", "ok", "cool"),
    ),
    (
        "praise",
        PRAISE,
        (
            "You are great",
            "Good job",
            "Well done",
            "You are smart",
            "I like you",
            "You are funny",
            "Good answer",
            "That is right",
            "You are helpful",
            "Great work",
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
    ("bye", BYE, ("Bye", "Goodbye", "See you", "Bye bye", "See you later", "That is all, bye", "Good night", "cya")),
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
            "What are you good at?",
            "What can I ask you?",
            "What can I do with you?",
            "What should I ask you?",
            "Are you a robot?",
            "Are you human?",
            "Are you ChatGPT?",
            "Are you a chatbot?",
            "What is this?",
            "Do you have a name?",
            "What's your name?",
            "Who created you?",
            "Who trained you?",
            "What are your skills?",
            "Tell me what you can do.",
            "I need help",
            "Can you do anything?",
            "help me",
            "What can you do for me?",
            "Who r u?",
        ),
    ),
)

BEFORE = ("", "", "", "Oh, ", "OK, ", "So, ", "Well, ")
AFTER = {
    "hello": ("", "!", " again", " my friend", ", model", " TokenMill"),
    "thanks": ("", "!", " for your help", " again", ", that helped", ", that is all I need"),
    "well": ("", " then", " this evening", " this morning", ", model"),
    "more": ("", "!", ".", " then", ", good", " so far"),
    "praise": ("", "!", ".", " indeed", ", model", " for a model"),
    "bye": ("", "!", " for now", " and take care", ", model", " TokenMill"),
    "who": ("", " please", ", in short", ", really", " exactly", ", model"),
}


def chat(rng: random.Random, split: Split) -> Sample:
    """A greeting or a question about the model; the wordings themselves are split."""

    def draw() -> tuple[str, tuple[str, str]]:
        kind, answer, texts = rng.choices(TALK, weights=(4, 2, 1, 1, 2, 2, 8))[0]
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
