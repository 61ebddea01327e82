"""Broad word lists, so that requests in free words are read rather than known by heart. Ordinary words only."""

from __future__ import annotations

import random

from .words import ANIMALS, CITIES, MORE_NAMES, NOUNS, listed, made_up_name


def _phrases(text: str) -> list[str]:
    return [phrase.strip() for phrase in text.replace("\n", " ").split(",")]


THINGS = listed(
    "lantern compass necklace crown sword shield scarf boot glasses telescope parrot treasure chest coat shoe sock "
    "shirt belt purse wallet camera phone laptop keyboard monitor printer speaker radio clock watch bicycle scooter "
    "car truck bus train boat ship canoe raft balloon airplane helicopter tractor bulb battery cable charger fridge "
    "oven stove toaster kettle pot pan plate bowl knife glass mug teapot towel soap brush comb mop broom bucket "
    "shovel rake hose seed flower rose tulip daisy pine oak willow forest meadow lake ocean island cave bridge "
    "tower castle palace barn stable fence wall roof floor ceiling stair sofa couch bed shelf drawer cupboard "
    "closet rug curtain painting statue vase piano flute trumpet harp banjo ball bat racket puzzle doll puppet "
    "robot marble dice card chessboard sweater dress skirt mask cape wand potion scroll letter envelope stamp "
    "parcel diary notebook pen eraser ruler scissors glue tape nail screw wrench saw drill axe anvil magnet lens "
    "prism candle torch matchbox whistle feather pebble crystal diamond ruby pearl amulet brooch bracelet button "
    "ribbon thread needle loom pumpkin carrot potato tomato pepper cucumber cabbage garlic banana cherry peach plum "
    "grape melon mango coconut walnut almond pretzel biscuit cookie pancake waffle muffin pie sandwich burger pizza "
    "cocoa teacup jug barrel sled snowball mitten igloo tent hammock backpack suitcase passport calendar poster "
    "banner trophy medal snowman kite drum gong chime sundial hourglass globe microscope satellite spaceship comet "
    "star moon sunflower"
)

BEINGS = listed(
    "dragon wizard witch knight princess prince pirate giant dwarf elf fairy ghost robot astronaut mermaid unicorn "
    "troll goblin captain detective inventor gardener shepherd fisherman clown juggler dancer bear wolf lion tiger "
    "elephant giraffe monkey zebra camel deer moose squirrel hedgehog beaver mole bat frog toad lizard snake "
    "crocodile whale dolphin shark seal penguin parrot eagle falcon swan peacock robin sparrow raven bee ant beetle "
    "butterfly ladybird spider snail crab octopus horse cow pig sheep donkey kitten puppy chick calf grandmother "
    "grandfather brother sister child boy girl student sailor baker farmer painter miller blacksmith"
)

COUNTRIES = listed(
    "France Japan Brazil Canada Italy Spain Egypt Kenya India China Mexico Norway Sweden Finland Poland Greece "
    "Turkey Chile Peru Cuba Iceland Ireland Portugal Austria Hungary Morocco Ghana Nigeria Vietnam Thailand "
    "Australia Germany Belgium Denmark Argentina Colombia Indonesia Korea"
)

LANGUAGES = listed(
    "French German Spanish Italian Japanese Chinese Russian Arabic Dutch Polish Latin Greek Swedish Hindi"
)

CODE = listed("Python Java JavaScript Rust Go Ruby Haskell SQL HTML CSS Bash Swift Kotlin C")

ROLES = _phrases(
    "president, prime minister, king, queen, mayor, captain, inventor, author, owner, director, leader, founder, "
    "coach, winner, chancellor, champion, composer, head, minister, governor, first man, first woman, singer, star, "
    "boss, best player, oldest person, richest person, tallest person, fastest runner, chief, manager"
)

CATEGORIES = listed(
    "river mountain country city animal bird fish tree planet star car train film song book game lake desert island "
    "building bridge ocean language continent dinosaur volcano snake flower dog cat company school airport stadium "
    "museum painting phone computer metal gas number word team player band ship plane road"
)

EXTREMES = listed(
    "largest smallest longest shortest tallest deepest oldest youngest fastest slowest heaviest lightest hottest "
    "coldest richest poorest biggest best worst first last most-visited loudest rarest cheapest brightest"
)

EVENTS = _phrases(
    "the world cup, the world championship, the Olympic games, the election, the last election, the war, the final, "
    "the super bowl, the race, the match, the song contest, the cup final, the league, the marathon, the lottery, "
    "the first world war, the second world war, the civil war, the revolution, the moon landing, the ice age, the "
    "gold rush, the middle ages, the industrial revolution, the big bang, the great fire, the earthquake, the "
    "festival, the grand prix, the tournament, the wedding, the battle, the debate, the strike, the eclipse"
)

FIELDS = _phrases(
    "football, basketball, tennis, cricket, rugby, golf, swimming, skiing, boxing, chess, poker, yoga, running, "
    "cycling, physics, chemistry, biology, geology, astronomy, algebra, geometry, calculus, statistics, history, "
    "geography, philosophy, psychology, economics, law, politics, medicine, art, music, poetry, literature, "
    "theatre, dance, opera, jazz, rock music, painting, photography, architecture, fashion, cooking, baking, "
    "gardening, farming, fishing, hunting, knitting, sewing, travel, tourism, religion, astrology, magic, "
    "mythology, folklore, democracy, capitalism, socialism, inflation, banking, insurance, taxes, marketing, "
    "advertising, real estate, investing, bitcoin, blockchain, crypto, the stock market, machine learning, deep "
    "learning, neural networks, robotics, programming, web design, databases, operating systems, computer viruses, "
    "hacking, video games, social media, the internet, smartphones, electric cars, solar power, wind power, nuclear "
    "energy, oil, climate change, global warming, recycling, pollution, evolution, genetics, DNA, cells, viruses, "
    "bacteria, vaccines, vitamins, diets, nutrition, sleep, dreams, stress, anxiety, headaches, fever, a cold, "
    "cancer, diabetes, allergies, first aid, the heart, the brain, the lungs, blood, bones, muscles, skin, teeth, "
    "photosynthesis, gravity, magnetism, electricity, light, sound, heat, energy, atoms, molecules, black holes, "
    "galaxies, the universe, the sun, the moon, planets, Mars, Jupiter, comets, rockets, satellites, space travel, "
    "aliens, dinosaurs, fossils, volcanoes, earthquakes, hurricanes, tornadoes, clouds, rain, snow, the seasons, "
    "oceans, rivers, deserts, rain forests, mountains, the Roman Empire, ancient Egypt, ancient Greece, the "
    "pyramids, castles, knights, pirates, vikings, kings, empires, love, friendship, happiness, death, life, the "
    "meaning of life, time, money, freedom, justice, peace, war, the weather, the news, the future, the past, my "
    "job, my boss, my homework, my exam, my diet, my dog, my garden, my back pain, a job interview, a birthday "
    "party, a wedding speech, a good film, a good book, a holiday, quantum physics, quantum computers, relativity, "
    "string theory, probability, prime numbers, fractals, coffee, tea, wine, beer, chocolate, sushi, pasta, pizza, "
    "bread, cheese, soup, salad, curry, cake, ice cream"
)

DEEDS = _phrases(
    "bake a cake, cook rice, boil an egg, fix a flat tyre, repair a bicycle, change a light bulb, paint a wall, "
    "grow tomatoes, plant a tree, train a dog, feed a cat, ride a horse, swim faster, lose weight, build muscle, "
    "sleep better, stop smoking, save money, pay taxes, buy a house, rent a flat, sell a car, find a job, write a "
    "resume, learn French, learn to dance, play the guitar, play chess, tie a tie, fold a shirt, sew a button, knit "
    "a scarf, make pizza, make coffee, brew beer, roast a chicken, cut an onion, remove a stain, clean a window, "
    "unclog a sink, build a table, build a website, hack a computer, delete a virus, speed up my laptop, take "
    "better photos, draw a face, sing better, meet new people, ask for a raise, get a visa, book a hotel, pack a "
    "suitcase, travel cheaply, jump higher, run a marathon, do a handstand, treat a burn, cure a cold, stop a "
    "nosebleed, fall asleep, wake up early, be happy, make friends, write a novel, write a song, get rich, win the "
    "lottery, become a doctor, fly a plane, sail a boat, catch a fish, light a fire, survive in the desert, read "
    "faster, study for an exam"
)

HOBBIES = _phrases(
    "tea, coffee, jazz, chess, tennis, hiking, swimming, cycling, dancing, singing, reading, painting, gardening, "
    "cooking, baking, running, skiing, sailing, fishing, knitting, old films, trains, maps, puzzles, board games, "
    "football, long walks, the sea, the mountains, the rain, summer, winter, cats, dogs, horses, birds, roses, "
    "chocolate, pancakes, pizza, apples, strawberries, ice cream, science, history, poems, comics, robots, space"
)

FEELINGS = listed("tired happy sad bored hungry sick lonely angry excited nervous late thirsty cold lost busy scared")


def name_of(rng: random.Random) -> str:
    """Any proper name: a country, a city, a first name or an invented one."""
    return rng.choice((rng.choice(COUNTRIES), rng.choice(CITIES), rng.choice(MORE_NAMES), made_up_name(rng)))


def word_of(rng: random.Random) -> str:
    """Any ordinary noun in small letters."""
    return rng.choice(rng.choice((THINGS, NOUNS, BEINGS, ANIMALS)))


def invented_noun(rng: random.Random) -> str:
    """A word in small letters that does not exist, so that copying one never depends on having seen it."""
    return made_up_name(rng).lower()
