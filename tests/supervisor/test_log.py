"""A log that writers append to, and that does not grow for ever."""

from workbench.supervisor.starting import LOG, said, shorten


def test_a_long_log_keeps_its_last_whole_lines(tmp_path):
    path = tmp_path / LOG
    with path.open("ab", buffering=0) as writer:
        writer.write(b"".join(b"line %04d\n" % number for number in range(1000)))
        shorten(tmp_path, most=10_000, kept=100)
        assert path.stat().st_size == 10_000
        writer.write(b"line 1000\n")
        shorten(tmp_path, most=10_000, kept=95)
        writer.write(b"line 1001\n")
    assert path.read_text().split("\n") == [f"line {number:04d}" for number in range(992, 1002)] + [
        ""
    ]


def test_what_was_said_last(tmp_path):
    assert said(tmp_path) == ""
    shorten(tmp_path)  # there is none
    (tmp_path / LOG).write_text("x" * 5000 + "the end")
    assert said(tmp_path).endswith("xthe end")
    assert len(said(tmp_path)) == 2000
