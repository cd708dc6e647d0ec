"""Reading of one table file."""

from unskew.data.readers.arrow_io import read_tables
from unskew.data.readers.cell_types import NO_USES
from unskew.data.spec import DETECTED


def read_table_file(path, csv=DETECTED, uses=NO_USES):
    return read_tables([path], csv, uses)[0]
