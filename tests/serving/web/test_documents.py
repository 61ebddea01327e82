"""Long files in the chat: kept beside the conversation, and searched for each message."""

import json
import math
import re
import unicodedata

import pytest

from tests.serving.web.test_browser import STORED, answers, ask, open_settings, until, wait_for_end
from tests.serving.web.test_everybody import serious
from tests.serving.web.test_pdf import attach, pdf

WORDS = ["river", "bank", "stone", "wheel", "sack", "flour", "road", "cart", "horse", "bread", "wind", "sail", "rope"]
FACTS = {
    "The bishop of Wexley owed the mill eleven geese.": "How many geese did the bishop owe?",
    "磨坊主的女儿名叫秋水。她养了三只猫。": "秋水养了几只猫",
    "Die Mühle brannte im Jahr 1731 völlig ab.": "In welchem Jahr brannte die MUHLE?",
}
HOSTILE = '``````\n</pre><script>globalThis.hacked=1</script><img src=x onerror="globalThis.hacked=2"> zebra'


def add_file(page, name, content):
    page.get_by_label("Your message").wait_for()
    file = {"name": name, "mimeType": "text/plain", "buffer": content.encode()}
    page.locator("form.composer input[type=file]").set_input_files([file])


def asked(page, text):
    """Asks, and returns what is sent as the last message."""
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, text)
    content = sent.value.post_data_json["messages"][-1]["content"]
    wait_for_end(page)
    return content


def send_whole_at_most(page, tokens):
    open_settings(page)
    page.get_by_label("Most tokens of files sent whole").fill(str(tokens))
    page.keyboard.press("Escape")


def long_text(rng):
    """Some hundred sentences of the same few words, and the facts among them."""
    draw = [" ".join(rng.choice(WORDS, rng.integers(5, 15))).capitalize() + "." for _ in range(400)]
    for fact in FACTS:
        draw.insert(int(rng.integers(len(draw))), fact)
    return "".join(sentence + ("\n\n" if rng.random() < 0.2 else " ") for sentence in draw)


def test_a_long_file_is_searched_for_each_message(echo, open_page, rng):
    page = open_page(echo.url)
    send_whole_at_most(page, 500)
    add_file(page, "mill.txt", long_text(rng))
    page.locator("form.composer").get_by_text("passages, searched for each message").wait_for()
    for fact, question in FACTS.items():
        content = asked(page, question)
        first = content.split("\n")[0]
        assert first.startswith("mill.txt (") and content.endswith(f"```\n\n{question}")
        assert plain(fact) in plain(content)
        assert len(content) < 10_000, "a part of it"
        sources = answers(page).last.locator(".sources")
        assert not sources.locator("pre").first.is_visible()
        sources.locator("summary").click()
        assert plain(fact) in plain(sources.inner_text())
        assert "mill.txt, passage" in sources.inner_text()
    assert serious(page) == []
    with page.expect_request("**/v1/chat/completions") as again:
        answers(page).last.get_by_role("button", name="Regenerate").click()
    assert again.value.post_data_json["messages"][-1]["content"] == content, "the same passages"
    wait_for_end(page)
    fact, question = next(iter(FACTS.items()))
    last = page.locator("article.user").last
    last.get_by_role("button", name="Edit").click()
    page.get_by_label("The message").fill(question)
    with page.expect_request("**/v1/chat/completions") as edited:
        page.get_by_role("button", name="Save as a branch").click()
    assert plain(fact) in plain(edited.value.post_data_json["messages"][-1]["content"])
    wait_for_end(page)


def plain(text):
    return " ".join(text.split())


def test_a_file_that_fits_is_sent_whole_and_the_next_one_is_searched(echo, open_page):
    page = open_page(echo.url)
    texts = {name: f"{name} grinds grain. " * 10 for name in ("one", "two")}
    body = {"prompt": texts["one"], "add_special_tokens": False}
    send_whole_at_most(page, int(1.5 * echo.post("/tokenize", body).json()["count"]))
    for name, text in texts.items():
        add_file(page, f"{name}.txt", text)
        page.locator("form.composer .file").filter(has_text=f"{name}.txt").wait_for()
    content = asked(page, "which mill")
    assert f"one.txt\n```\n{texts['one']}\n```" in content
    assert "two.txt (1/1)\n```\ntwo grinds grain." in content, "nothing is found: its beginning"


def test_a_document_is_kept_exported_imported_and_forgotten(echo, open_page, rng, tmp_path):
    page = open_page(echo.url)
    send_whole_at_most(page, 100)
    add_file(page, "mill.txt", long_text(rng))
    page.locator("form.composer .file").wait_for()
    fact, question = next(iter(FACTS.items()))
    asked(page, "hello")
    page.reload()
    answers(page).last.wait_for()
    assert plain(fact) in plain(asked(page, question)), "after a reload"
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export").click()
    saved.value.save_as(tmp_path / "kept.json")
    (kept,) = json.loads((tmp_path / "kept.json").read_text())
    assert [one["name"] for one in kept["documents"]] == ["mill.txt"]
    page.get_by_role("button", name="Delete hello").click()
    page.get_by_role("button", name="Dismiss").wait_for()
    assert count_kept(page) == 1, "it can be had back"
    page.evaluate(AGE)
    page.reload()
    until(page, lambda: count_kept(page) == 0)
    page.locator("input[type=file][aria-label=Import]").set_input_files(tmp_path / "kept.json")
    answers(page).last.wait_for()
    assert plain(fact) in plain(asked(page, question)), "imported"
    del kept["documents"]
    (tmp_path / "torn.json").write_text(json.dumps([kept]))
    page.locator("input[type=file][aria-label=Import]").set_input_files(tmp_path / "torn.json")
    page.get_by_role("alert").get_by_text("a message of this file is damaged").wait_for()


def count_kept(page):
    return len(page.evaluate(STORED, "documents"))


# Lets what was deleted have been so long ago that the page forgets it.
AGE = """() => new Promise((resolve) => {
  const request = indexedDB.open("tokenmill");
  request.onsuccess = () => {
    const transaction = request.result.transaction(["conversations", "heads"], "readwrite");
    for (const name of ["conversations", "heads"])
     transaction.objectStore(name).openCursor().onsuccess = ({ target }) => {
      if (!target.result) return;
      if (target.result.value.deleted) target.result.update({ ...target.result.value, deleted: 1 });
      target.result.continue();
    };
    transaction.oncomplete = () => { request.result.close(); resolve(); };
  };
})"""


# The store as pages had it before there were documents.
OLD_STORE = """(conversation) => new Promise((resolve) => {
  const request = indexedDB.open("tokenmill", 2);
  request.onupgradeneeded = () => {
    for (const name of ["conversations", "heads"]) request.result.createObjectStore(name, { keyPath: "id" });
    request.result.createObjectStore("parts", { autoIncrement: true }).createIndex("conversation", "conversation");
  };
  request.onsuccess = () => {
    const transaction = request.result.transaction(["conversations", "heads"], "readwrite");
    transaction.objectStore("conversations").put(conversation);
    transaction.objectStore("heads").put({ ...conversation, isWriting: false, deleted: 0, count: 1 });
    transaction.oncomplete = () => { request.result.close(); resolve(); };
  };
})"""


def test_conversations_of_older_pages_stay(echo, open_page):
    page = open_page(f"{echo.url}/web/icon.svg")
    message = {"id": 1, "parent": None, "role": "user", "content": "from before"}
    old = {"id": "old", "title": "Of old", "created": 1, "updated": 1, "chosen": {}, "settings": {}}
    page.evaluate(OLD_STORE, old | {"messages": [message]})
    page.goto(echo.url)
    page.get_by_role("button", name="Of old", exact=True).click()
    page.get_by_role("article", name="You").get_by_text("from before").wait_for()
    assert count_kept(page) == 0


def test_a_document_that_the_browser_does_not_keep_is_not_sent(echo, open_page, rng):
    page = open_page(echo.url)
    send_whole_at_most(page, 100)
    page.evaluate(
        """() => {
          const put = IDBObjectStore.prototype.put;
          IDBObjectStore.prototype.put = function (...given) {
            if (this.name === "documents") throw new DOMException("full", "QuotaExceededError");
            return put.apply(this, given);
          };
        }"""
    )
    add_file(page, "mill.txt", long_text(rng))
    page.locator("form.composer .file").wait_for()
    ask(page, "hello")
    page.get_by_role("alert").get_by_text("This browser keeps no more").wait_for()
    assert page.get_by_label("Your message").input_value() == "hello"
    assert answers(page).count() == 0
    page.get_by_role("button", name="Remove mill.txt").click()
    assert "hello" in asked(page, "hello")


def test_files_of_a_draft_stay_with_it(echo, open_page):
    page = open_page(echo.url)
    composer = page.locator("form.composer")
    asked(page, "the first")
    add_file(page, "one.txt", "first")
    composer.get_by_text("one.txt").wait_for()
    page.get_by_role("button", name="New conversation").click()
    until(page, lambda: composer.get_by_text("one.txt").count() == 0)
    add_file(page, "two.txt", "second")
    composer.get_by_text("two.txt").wait_for()
    until(page, lambda: "two.txt" in str(page.evaluate(STORED, "drafts")))
    page.reload()
    composer.get_by_text("two.txt").wait_for()
    assert composer.locator(".file").count() == 1, "of the conversation that is open"
    page.get_by_role("button", name="Remove two.txt").click()
    page.get_by_role("button", name="the first", exact=True).click()
    composer.get_by_text("one.txt").wait_for()
    assert composer.locator(".file").count() == 1
    page.reload()
    composer.get_by_text("one.txt").wait_for()
    assert "one.txt\n```\nfirst\n```" in asked(page, "what is in it")
    page.reload()
    answers(page).last.wait_for()
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("heading", name=re.compile("^Ask ")).wait_for()
    assert composer.locator(".file").count() == 0


def test_the_text_of_a_long_pdf_is_searched(echo, open_page):
    page = open_page(echo.url)
    fact = "the miller counts nine zebras"
    attach(page, "long.pdf", pdf([*["word " * 1000] * 90, fact]))
    page.locator("form.composer").get_by_text("passages, searched for each message").wait_for()
    assert fact in asked(page, "how many zebras")


def test_a_hostile_document_stays_harmless(echo, open_page, rng):
    page = open_page(echo.url)
    send_whole_at_most(page, 50)
    name = '"><img src=x onerror=globalThis.hacked=3>.txt'
    add_file(page, name, f"{long_text(rng)}\n\n{HOSTILE}\n\n{long_text(rng)}")
    page.locator("form.composer .file").wait_for()
    content = asked(page, "zebra")
    (fence,) = {line for line in content.split("\n") if line.strip("`") == "" and len(line) > 6}
    assert content.count(f"\n{fence}\n") == 2, "no fence of the document ends it"
    sources = answers(page).last.locator(".sources")
    sources.locator("summary").click()
    assert HOSTILE in sources.inner_text()
    assert sources.locator("script, img").count() == 0
    assert page.evaluate("globalThis.hacked ?? null") is None


def test_a_file_beyond_bounds_is_refused(echo, open_page):
    page = open_page(echo.url)
    add_file(page, "huge.txt", "x" * 5_000_001)
    page.get_by_role("alert").get_by_text("huge.txt: a text may have 5,000 kB at most").wait_for()


# Reads a long text, and says how it is cut and what questions find; and how long the page was held up meanwhile.
SEARCH = """async ([text, questions]) => {
  const { cut, Index, rank } = await import("/web/passages.js");
  const pieces = cut(text).map((place) => text.slice(...place));
  const index = await Index.of(text);
  return { pieces, found: questions.map((one) => rank([index], one).map(({ passage, score }) => [passage, score])) };
}"""
SPACED = [*WORDS, "geese", "bishop", "Straße", "café"]


def test_passages_are_the_text_and_ranks_are_those_of_the_formula(echo, open_page, rng):
    page = open_page(echo.url)
    page.get_by_label("Your message").wait_for()
    text = "".join(rng.choice(SPACED) + str(rng.choice([" ", " ", ". ", "\n", "\n\n"])) for _ in range(3000))
    questions = [" ".join(rng.choice(SPACED, 3)) for _ in range(5)]
    result = page.evaluate(SEARCH, [text, questions])
    assert "".join(result["pieces"]) == text
    assert max(map(len, result["pieces"])) <= 600
    for question, found in zip(questions, result["found"], strict=True):
        wanted = bm25(result["pieces"], question)
        assert [place for place, _ in found] == [place for place, _ in wanted]
        assert [score for _, score in found] == pytest.approx([score for _, score in wanted])


def bm25(passages, question):
    """The slow way: Robertson and Zaragoza (2009), with k1 1.2 and b 0.75."""
    split = [stemmed(passage) for passage in passages]
    average = sum(map(len, split)) / len(split)
    scores = [0.0] * len(split)
    for word in set(stemmed(question)):
        holders = sum(word in words for words in split)
        weight = math.log(1 + (len(split) - holders + 0.5) / (holders + 0.5))
        for place, words in enumerate(split):
            count = words.count(word)
            scores[place] += weight * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(words) / average))
    return sorted(((place, score) for place, score in enumerate(scores) if score), key=lambda one: -one[1])


def stemmed(text):
    """Words without accents, and the beginnings of those of more than five letters beside them."""
    parts = unicodedata.normalize("NFKD", text)
    found = re.findall(r"\w+", "".join(one for one in parts if not unicodedata.combining(one)).lower())
    return [form for word in found for form in ([word, word[:5] + "*"] if len(word) > 5 else [word])]


RANKED = {
    "Why is a request preempted?": [
        "Why? Why is it so, and what is a why?",
        "A preemption takes the pages of a request.",
    ],
    "Warum werden Anfragen verdrängt?": [
        "Warum, warum werden wir das?",
        "Die Verdrängung nimmt einer Anfrage die Seiten.",
    ],
    "Pourquoi une requête est-elle évincée ?": ["Pourquoi est-elle une ?", "Les requêtes évincées attendent."],
    "¿Por qué se desalojan las peticiones?": ["¿Por qué? ¿Por qué?", "Una petición desalojada espera."],
    "为什么请求被抢占": ["为什么。为什么。", "抢占会拿走请求的页。"],
    "who": ["Nobody knows.", "Who is there?"],
}


@pytest.mark.parametrize("question", RANKED)
def test_what_a_question_is_about_counts_not_what_questions_are_made_of(echo, open_page, question):
    page = open_page(echo.url)
    page.get_by_label("Your message").wait_for()
    best = page.evaluate(
        """async ([texts, question]) => {
          const { Index, rank } = await import("/web/passages.js");
          return rank(await Promise.all(texts.map((text) => Index.of(text))), question)[0]?.which;
        }""",
        [RANKED[question], question],
    )
    assert best == 1


@pytest.mark.parametrize("text", ["", "x", "漢" * 5000, "😀" * 5000, "a" * 5000, "ที่นี่มีโรงสี" * 300])
def test_every_text_is_cut_without_loss(echo, open_page, text):
    page = open_page(echo.url)
    page.get_by_label("Your message").wait_for()
    pieces = page.evaluate(SEARCH, [text, []])["pieces"]
    assert "".join(pieces) == text
    assert all(0 < len(piece.encode("utf-16-le", "strict")) // 2 <= 600 for piece in pieces)


def test_a_script_without_spaces_is_found_by_pairs(echo, open_page):
    page = open_page(echo.url)
    page.get_by_label("Your message").wait_for()
    texts = ["水车在河边转动。", "磨坊主有三只猫。", "ที่นี่มีโรงสีเก่า", "방앗간은 강가에 있다"]
    found = page.evaluate(
        """async ([texts, questions]) => {
          const { Index, rank } = await import("/web/passages.js");
          const indexes = await Promise.all(texts.map((text) => Index.of(text)));
          return questions.map((question) => rank(indexes, question)[0]?.which);
        }""",
        [texts, ["河边的水车", "猫", "โรงสีอยู่ไหน", "방앗간이 어디"]],
    )
    assert found == [0, 1, 2, 3]
