"""PDFs in the chat: their text is sent, and one without text that can be read is refused with the reason."""

import pytest

from tests.serving.web.test_browser import ask


def pdf(pages: list[str], trailer: str = "") -> bytes:
    """A PDF with a line of text on each page, written by the book (ISO 32000-1, annex H)."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for text in pages:
        # As small as the line must be: words beside the page are no text of it.
        drawn = f"BT /F1 {min(24, 400 / max(1, len(text)))} Tf 72 700 Td ({text}) Tj ET" if text else "0 0 50 50 re f"
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
        parts = f"/Contents {len(objects)} 0 R /Resources << /Font << /F1 3 0 R >> >> /MediaBox [0 0 612 792]"
        objects.append(f"<< /Type /Page /Parent 2 0 R {parts} >>")
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    body, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{len(body)}\n%%EOF\n"
    return f"{body}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode("latin-1")


# What no empty password opens (standard handler, revision 2).
ENCRYPTED = f"/ID [<00> <00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'41' * 32}> /U <{'42' * 32}> >>"
UNREADABLE = {
    "locked": (pdf(["secret"], ENCRYPTED), "this PDF asks for a password"),
    "scanned": (pdf(["", ""]), "this PDF holds no text"),
    "broken": (b"%PDF-1.7\0\xff", "this is no PDF that can be read"),
    "text": (b"plain words", "this is no PDF that can be read"),
}


def attach(page, name: str, content: bytes) -> None:
    page.get_by_label("Your message").wait_for()
    file = {"name": name, "mimeType": "application/pdf", "buffer": content}
    page.locator("form.composer input[type=file]").set_input_files([file])


def test_the_text_of_a_pdf_is_sent(echo, open_page):
    page = open_page(echo.url)
    attach(page, "Mill.PDF", pdf(["one page", "", "and another"]))
    page.locator("form.composer").get_by_text("Mill.PDF").wait_for()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "what is it")
    content = sent.value.post_data_json["messages"][0]["content"]
    assert content == "Mill.PDF\n```\none page\n\nand another\n```\n\nwhat is it"


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_pdf_without_text_that_can_be_read_is_refused_with_the_reason(echo, open_page, case):
    content, reason = UNREADABLE[case]
    page = open_page(echo.url)
    attach(page, f"{case}.pdf", content)
    page.get_by_role("alert").get_by_text(f"{case}.pdf: {reason}").wait_for()
    assert page.locator("form.composer .file").count() == 0
