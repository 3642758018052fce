"""What a server computes at its start."""

import logging

from mlxcache.cli.warming import warm_files
from mlxcache.errors import ContextLengthExceeded
from tests.api.fake import FakeEngine


async def test_each_file_is_computed_and_a_bad_one_stops_none(tmp_path, caplog):
    """The log says which, why, and what it took."""
    good, bad, gone = (tmp_path / name for name in ("good", "bad", "gone"))
    good.write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    bad.write_text("{")
    engine = FakeEngine()
    with caplog.at_level(logging.INFO, "mlxcache"):
        await warm_files(engine, (bad, gone, good))
    assert len(engine.jobs) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" is ")[0] for line in lines] == [str(bad), str(gone), str(good)]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    engine.submit_error = ContextLengthExceeded("prompt is too long")
    await warm_files(engine, (good,))
    assert "too long" in caplog.text
