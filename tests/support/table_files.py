"""Reading of one table file."""

from unskew.data.csv_format import DETECTED
from unskew.data.readers.arrow_io import read_tables
from unskew.data.readers.cell_types import NO_USES


def read_table_file(path, csv=DETECTED, uses=NO_USES):
    return read_tables([path], csv, uses)[0]
