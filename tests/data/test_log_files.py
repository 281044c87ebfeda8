"""Tables are opened as people have them; what was found out is said, what is wrong is named."""

import gzip

import polars as pl
import pyarrow as pa
import pytest

from slipstream.data.choices import Choices
from slipstream.data.log_files import expand_paths, find_separator, open_files, open_frame
from slipstream.data.preparation import prepare
from slipstream.data.raw_log import Columns
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import GOOD, run_cli, sequences

EXPECTED = {1: [(5, 1), (6, 2)], 2: [(5, 3), (7, 4)]}
COLUMNS = Columns("user_id", "item_id", "timestamp", ("click",))


class ArrowOnly:
    """A table that can only be handed over by Arrow's protocol, as pandas has it."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def write(path, separator=","):
    frame = pl.DataFrame(GOOD)
    if path.name.endswith(".gz"):
        text = frame.write_ndjson() if ".csv" not in path.name else frame.write_csv()
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix in (".jsonl", ".ndjson"):
        frame.write_ndjson(path)
    elif path.suffix == ".parquet":
        frame.write_parquet(path)
    else:
        frame.write_csv(path, separator=separator)
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_found_and_said(separator, tmp_path, monkeypatch, capsys):
    write(tmp_path / "log.csv", separator)
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    assert run_cli(arguments, monkeypatch) == 0
    said = {",": "','", ";": "';'", "\t": "tab", "|": "'|'"}[separator]
    assert f"read 4 rows of log.csv, separated by {said}" in capsys.readouterr().out


def test_wanted_columns_decide_between_separators(tmp_path):
    (tmp_path / "log.csv").write_text("user;item, its size, its colour;time\n1;2;3\n")
    assert find_separator(tmp_path / "log.csv", ["user", "time"]) == ";"
    (tmp_path / "one.csv").write_text("user\n1\n")
    assert find_separator(tmp_path / "one.csv", ["user"]) == ","
    (tmp_path / "quoted.csv").write_text('\ufeff"a;b;c;d",user\n1,2\n')
    assert find_separator(tmp_path / "quoted.csv", ["user"]) == ","


@pytest.mark.parametrize(
    "name", ["a.csv", "a.csv.gz", "a.parquet", "a.jsonl", "a.ndjson", "a.jsonl.gz"]
)
def test_every_format_gives_the_same_store(name, tmp_path):
    path = write(tmp_path / name)
    store = prepare(path, tmp_path / "out", Choices(columns=COLUMNS))
    assert sequences(store) == EXPECTED and store.actions["click"].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "make",
    [
        pl.DataFrame,
        pl.LazyFrame,
        pa.table,
        lambda columns: ArrowOnly(pa.table(columns)),
    ],
    ids=["DataFrame", "LazyFrame", "Arrow", "protocol"],
)
def test_a_frame_in_memory_is_a_log(make, tmp_path):
    store = prepare(make(GOOD), tmp_path / "out", Choices(columns=COLUMNS))
    assert sequences(store) == EXPECTED
    assert "frame" in store.meta["source"]["path"]


def test_a_pandas_frame_is_a_log(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(GOOD | {"item_id": [5.0, 6.0, None, 7.0]})
    frame["timestamp"] = pandas.to_datetime(frame["timestamp"], unit="s", utc=True)
    store = prepare(frame, tmp_path / "out", Choices(columns=COLUMNS))
    assert sequences(store) == {1: [(5, 1), (6, 2)], 2: [(7, 4)]}


def test_several_files_a_folder_and_a_pattern_are_one_log(tmp_path, monkeypatch, capsys):
    logs = tmp_path / "logs"
    logs.mkdir()
    for part in range(3):
        text = f"user_id,item_id,timestamp\n{part},{part + 10},5\n7,{part + 20},{part}\n"
        (logs / f"day{part}.csv").write_text(text)
    (logs / "_SUCCESS.csv").write_text("")
    expected = {0: [(10, 5)], 1: [(11, 5)], 2: [(12, 5)], 7: [(20, 0), (21, 1), (22, 2)]}
    paths = [logs / f"day{part}.csv" for part in range(3)]
    given = {
        "many": paths,
        "folder": [logs],
        "pattern": [logs / "day*.csv"],
        "both": [*paths, logs],
    }
    for name, several in given.items():
        arguments = ["data", "prepare", *several, "--out", tmp_path / name]
        assert run_cli(arguments, monkeypatch) == 0
        assert "day0.csv and 2 more in 3 files" in capsys.readouterr().out
    stores = [prepare(several, tmp_path / f"py-{name}") for name, several in given.items()]
    assert all(sequences(store) == expected for store in stores)
    assert len({store.digest for store in stores}) == 1


def test_columns_in_another_order_are_found_by_name(tmp_path):
    (tmp_path / "a.csv").write_text("user_id,item_id,timestamp\n1,2,3\n")
    (tmp_path / "b.csv").write_text("extra,timestamp,item_id,user_id\nx,30,20,10\n")
    store = prepare([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out")
    assert sequences(store) == {1: [(2, 3)], 10: [(20, 30)]}
    (tmp_path / "b.csv").write_text("extra,timestamp,user_id\nx,30,20,10\n")
    with pytest.raises(SlipstreamError, match=r"b.csv has no column 'item_id', which other"):
        prepare([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out2")


def test_json_lines_may_lack_fields_and_mix_types(tmp_path):
    rows = [f'{{"user_id": {n}, "item_id": "a", "timestamp": 5}}\n' for n in range(300)]
    rows.append('{"item_id": "b", "user_id": "x", "timestamp": 6, "more": [1, 2]}\n')
    (tmp_path / "log.jsonl").write_text("".join(rows))
    store = prepare(tmp_path / "log.jsonl", tmp_path / "out")
    assert store.users.find("x") is not None and store.num_users == 301


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.csv": "user_id\n1\n", "b.parquet": None}, "mix CSV and Parquet"),
        ({"a.csv": "u;i\n1;2\n", "b.csv": "u,i\n1,2\n"}, "different separators"),
        ({"a.csv": "u,i\n1,2\n", "b.csv": ""}, "b.csv is empty"),
        ({"a.jsonl": '{"u": 1}\nno json\n'}, "could not be read"),
        ({"a.csv.gz": "no gzip"}, "could not be read"),
        ({"a.csv": "user_id,user_id,b\n1,2,3\n"}, "a.csv has two columns 'user_id'"),
        ({"a.csv": b"user_id,item_id\n1,caf\xe9\n"}, "save it as UTF-8"),
        ({"a.xlsx": "x"}, "neither CSV nor Parquet nor JSON lines"),
    ],
)
def test_files_that_do_not_go_together_are_refused(files, expected, tmp_path):
    for name, text in files.items():
        if text is None:
            write(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SlipstreamError, match=expected):
        prepare([tmp_path / name for name in files], tmp_path / "out")


def test_what_is_not_there_is_said(tmp_path):
    write(tmp_path / "events.csv")
    with pytest.raises(SlipstreamError, match=r"does not exist; did you mean '.*events.csv'"):
        expand_paths([tmp_path / "event.csv"])
    with pytest.raises(SlipstreamError, match=r"no file matches '.*x\*.csv'"):
        expand_paths([str(tmp_path / "x*.csv")])
    with pytest.raises(SlipstreamError, match="got int"):
        prepare(5, tmp_path / "out")
    with pytest.raises(SlipstreamError, match="only one of them"):
        prepare(None, tmp_path / "out")


def test_a_row_is_named_by_its_file(tmp_path):
    write(tmp_path / "a.csv")
    write(tmp_path / "b.csv")
    table = open_files([tmp_path / "a.csv", tmp_path / "b.csv"])
    assert (table.place(4), table.place(5)) == ("row 4 of a.csv", "row 1 of b.csv")
    assert open_frame(pl.DataFrame(GOOD)).place(3) == "row 3"
