"""One run as a notebook sees it: submitted, followed, changed, compared with its prediction."""
