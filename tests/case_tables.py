"""Tables of cases as text: a row a line, cells between marks."""


def rows_of(table: str, mark: str = "=>") -> list[list[str]]:
    """The cells of each row; a line that begins with two spaces continues the row above it."""
    rows = table.strip("\n").replace("\n  ", " ").split("\n")
    return [[cell.strip() for cell in row.split(mark)] for row in rows]


def cells(row: str, mark: str = " | ") -> list[str]:
    """The cells of one row, with their spaces."""
    return row.split(mark)
