"""The page speaks the language of its browser, or the one that somebody has chosen."""

import pytest

from tests.serving.server.test_page_texts import LANGUAGES
from tests.serving.web.test_browser import until


@pytest.mark.parametrize(
    ("locale", "send", "settings"),
    [("de-AT", "Senden", "Einstellungen"), ("zh-CN", "发送", "设置"), ("fr-CA", "Envoyer", "Réglages"),
     ("es-MX", "Enviar", "Ajustes"), ("pt-BR", "Send", "Settings")],
)  # fmt: skip
def test_the_page_speaks_the_language_of_the_browser(echo, open_page, locale, send, settings):
    page = open_page(echo.url, width=390, locale=locale)
    page.get_by_role("button", name=send).wait_for()
    page.get_by_role("button", name=settings).wait_for()
    shown = page.evaluate("document.documentElement.lang")
    assert shown == (locale[:2] if locale[:2] in LANGUAGES else "en")
    for tab in ("live", "compare", "api", "chat"):
        page.evaluate("tab => { location.hash = tab }", tab)
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (tab, locale)


def test_a_chosen_language_stays(echo, open_page):
    page = open_page(echo.url)
    page.get_by_label("Language").select_option("de")
    page.get_by_role("button", name="Senden").wait_for()
    page.get_by_label("Deine Nachricht").fill("hallo")
    page.get_by_role("button", name="Senden").click()
    answers_in_german = page.get_by_role("article", name="Modell")
    until(page, lambda: "hallo" in answers_in_german.inner_text())
    page.reload()
    page.get_by_role("button", name="Senden").wait_for()
    page.get_by_label("Sprache").select_option("en")
    page.get_by_role("button", name="Send").wait_for()
