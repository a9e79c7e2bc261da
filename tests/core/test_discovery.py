import os
import sys

import pytest

from torchtitan_npu_core.discovery import discover

ENTRY = "[torchtitan_npu.converters]\n{} = {}\n"


def records_of(*names):
    return [r for r in discover() if r.distribution in names]


def test_finds_a_plugin_without_importing_it(fake_distribution):
    fake_distribution(
        "acme-one",
        version="2.1",
        entry_points=ENTRY.format("one", "acme_one"),
        modules={"acme_one": "raise SystemExit('imported')"},
    )
    (record,) = records_of("acme-one")
    assert (record.name, record.value, record.version) == ("one", "acme_one", "2.1")
    assert record.state == "available"
    assert "acme_one" not in sys.modules


def test_symlinked_folder_on_the_path_is_one_plugin(fake_distribution, tmp_path, monkeypatch):
    fake_distribution("acme-one", entry_points=ENTRY.format("one", "acme_one"))
    link = tmp_path / "link"
    os.symlink(tmp_path / "site", link)
    monkeypatch.syspath_prepend(str(link))
    (record,) = records_of("acme-one")
    assert record.state == "available"
    assert record.also_at == ()


def test_stale_egg_info_in_the_working_directory_is_the_same_plugin(fake_distribution):
    fake_distribution("acme-one", site="site", entry_points=ENTRY.format("one", "acme_one"))
    fake_distribution(
        "acme_one", site="cwd", layout="egg-info", entry_points=ENTRY.format("one", "acme_one")
    )
    (record,) = records_of("acme-one", "acme_one")
    assert record.state == "available"
    assert len(record.also_at) == 1


def test_duplicate_plugin_name_disables_both_and_names_both_distributions(fake_distribution):
    for name in ("acme-one", "acme-two"):
        fake_distribution(name, entry_points=ENTRY.format("same", name.replace("-", "_")))
    records = records_of("acme-one", "acme-two")
    assert [r.state for r in records] == ["duplicate", "duplicate"]
    for record in records:
        assert "acme-one 1.0" in record.message
        assert "acme-two 1.0" in record.message


def test_disabling_one_of_two_duplicates_frees_the_other(fake_distribution, monkeypatch):
    for name in ("acme-one", "acme-two"):
        fake_distribution(name, entry_points=ENTRY.format("same", name.replace("-", "_")))
    monkeypatch.setenv("TORCHTITAN_NPU_DISABLE_PLUGINS", "Acme.One")
    states = {r.distribution: r.state for r in records_of("acme-one", "acme-two")}
    assert states == {"acme-one": "disabled", "acme-two": "available"}


def test_disabling_by_plugin_name(fake_distribution, monkeypatch):
    fake_distribution("acme-one", entry_points=ENTRY.format("one", "acme_one"))
    monkeypatch.setenv("TORCHTITAN_NPU_DISABLE_PLUGINS", "other, one")
    (record,) = records_of("acme-one")
    assert record.state == "disabled"


def test_metadata_without_a_version_does_not_stop_discovery(fake_distribution):
    metadata = fake_distribution("acme-one", entry_points=ENTRY.format("one", "acme_one"))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-one\n")
    (record,) = records_of("acme-one")
    assert record.version == "?"


def test_order_does_not_depend_on_the_path(fake_distribution):
    fake_distribution("acme-b", site="first", entry_points=ENTRY.format("bbb", "acme_b"))
    fake_distribution("acme-a", site="second", entry_points=ENTRY.format("aaa", "acme_a"))
    names = [r.name for r in records_of("acme-a", "acme-b")]
    assert names == ["aaa", "bbb"]


@pytest.mark.parametrize("content", [b"[console_scripts]\nfoo", b"\xff\xfe[x]\ny = z", b"\x00"])
def test_unreadable_metadata_of_others_is_passed_over(fake_distribution, content):
    metadata = fake_distribution("foo")
    (metadata / "entry_points.txt").write_bytes(content)
    fake_distribution("acme-one", entry_points=ENTRY.format("one", "acme_one"))
    assert [r.state for r in records_of("acme-one")] == ["available"]
    assert records_of("foo") == []


def test_unreadable_metadata_of_a_plugin_is_a_broken_record(fake_distribution):
    metadata = fake_distribution("acme-one", entry_points=ENTRY.format("one", "acme_one"))
    (metadata / "entry_points.txt").write_text("[torchtitan_npu.converters]\nnonsense")
    broken = [r for r in discover() if r.state == "broken" and "acme_one" in r.name]
    assert len(broken) == 1
    assert "cannot be read" in broken[0].message
