"""Images in the chat of the page, where the model takes them: added, dropped, taken back, sent and shown."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from tests.serving.server.running_server import start_server
from tests.serving.web.test_browser import answers, wait_for_end
from tests.vision_checkpoints import make_vision_checkpoint
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    model = make_vision_checkpoint(tmp_path_factory.mktemp("seeing"))
    config = EngineConfig(model=str(model), dtype="float32", num_pages=200, max_num_seqs=4)
    with start_server(config, ENGINE_MODULE, served_model_name=("seeing",)) as server:
        yield server


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(file, "PNG")
    return file.getvalue()


def test_an_image_is_added_dropped_and_sent(seeing, open_page):
    page = open_page(seeing.url)
    page.get_by_role("button", name="Add an image").wait_for()
    page.locator("input[type=file][aria-label='Add an image']").set_input_files(
        [{"name": "red.png", "mimeType": "image/png", "buffer": png("red")}]
    )
    composer = page.locator("form.composer")
    composer.get_by_role("img", name="Image 1").wait_for()
    for colour in ("green", "blue"):  # dropped, one after the other
        page.evaluate(
            """([name, data]) => {
              const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
              const transfer = new DataTransfer();
              transfer.items.add(new File([bytes], name, { type: "image/png" }));
              const drop = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
              document.querySelector("form.composer").dispatchEvent(drop);
            }""",
            [f"{colour}.png", base64.b64encode(png(colour)).decode()],
        )
    composer.get_by_role("img", name="Image 3").wait_for()
    composer.get_by_role("button", name="Remove image 2").click()
    composer.get_by_role("img", name="Image 3").wait_for(state="detached")
    page.get_by_label("Your message").fill("what is it")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens of an answer").fill("6")
    page.get_by_role("button", name="Send").click()
    wait_for_end(page)
    asked = page.get_by_role("article", name="You")
    assert asked.get_by_role("img").count() == 2
    assert composer.get_by_role("img").count() == 0
    assert "prompt tokens" in answers(page).inner_text()
    seeing.wait_for(lambda: seeing.metric("mm_cache_queries_total") >= 2)


def test_an_image_is_among_the_things_to_try(seeing, open_page):
    page = open_page(seeing.url)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="What does this image show?").click()
    chooser.value.set_files([{"name": "red.png", "mimeType": "image/png", "buffer": png("red")}])
    page.locator("form.composer").get_by_role("img", name="Image 1").wait_for()
    assert page.get_by_label("Your message").input_value() == "What does this image show?"
    assert page.locator(".tries button").count() == 3


def test_a_model_of_texts_is_shown_none(echo, open_page):
    page = open_page(echo.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_placeholder("1", exact=True).first.wait_for()  # what the server says of its model is there
    assert page.get_by_role("button", name="Add an image").count() == 0
