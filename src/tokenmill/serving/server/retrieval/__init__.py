"""The routes of retrieval: rerank, score, classify and pool, in the forms of those who serve them."""
