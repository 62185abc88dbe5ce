"""How a table looks on a console and in LaTeX."""

import io

from rich.console import Console

from fedjax_cluster.report.table import Column, Number, Table


def printed(table, width):
    text = io.StringIO()
    table.print(Console(file=text, width=width))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_a_name_stands_on_the_first_line_of_its_row_and_headings_on_their_last():
    text = "one two three four five six seven eight nine ten"
    assert printed(Table("", (Column(""), Column("")), (("memory", text), ("time", "1 s"))), 30) == [
        "memory  one two three four",
        "        five six seven eight",
        "        nine ten",
        "time    1 s",
    ]
    headed = Table("", (Column("method"), Column("a b c d e f g h i j k")), (("IFCA", Number(1.0)),))
    assert [line.split()[0] for line in printed(headed, 20) if "method" in line or "IFCA" in line] == ["method", "IFCA"]
    lines = printed(headed, 20)
    assert "a b" in lines[0]
    assert "method" not in lines[0]
