"""The table that `npu-smi info` prints, in the forms of Atlas A2 and A3 and of its releases, and without devices."""

import subprocess

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import npu_smi

A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 92.3        31                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3388 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | {health}| 86.7        30                0    / 0             |
| 0                         | 0000:C2:00.0  | 97          0    / 0          {used}/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 1       0                 | 2314511       | python3                  | 56331                   |
+===========================+===============+====================================================+
"""
# A container that was given the cards 2 and 3.
A3 = """\
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc1                            Version: 26.0.rc1                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 2     Ascend910           | OK            | 176.3                36                      0    / 0                |
| 0     4                   | 0000:95:00.0  | 0                    0    / 0                3411 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 2     Ascend910           | OK            | -                    36                      0    / 0                |
| 1     5                   | 0000:97:00.0  | 0                    0    / 0                3208 / 65536            |
+===========================+===============+======================================================================+
| 3     Ascend910           | Critical      | 171.0                90                      0    / 0                |
| 0     6                   | 0000:99:00.0  | 0                    0    / 0                3125 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 3     Ascend910           | OK            | -                    36                      0    / 0                |
| 1     7                   | 0000:9B:00.0  | 100                  0    / 0                59536/ 65536            |
+===========================+===============+======================================================================+
"""
NO_DEVICES = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.2                   Version: 25.5.2                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
"""
# Cards of 310P: two chips whose line names the device, memory without HBM, no power of a second chip.
PAIRED = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 25.0.rc1.1                               Version: 25.0.rc1.1                                   |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 8       310P3                 | OK              | NA           47                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1475 / 44280                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 8       310P3                 | OK              | NA           45                0     / 0             |
| 1       1                     | 0000:01:00.0    | 0            1318 / 43693                            |
+===============================+=================+======================================================+
"""


def a2(health="OK", used="3391 "):
    return A2.format(health=health.ljust(14), used=used)


def said(text, visible=None):
    return list(npu_smi.check(npu_smi.parse(text), visible))


def test_one_chip_per_card_has_the_number_of_its_card():
    report = npu_smi.parse(a2())
    assert report.version == "25.2.0"
    assert report.chips == (
        npu_smi.Chip(0, 0, "910B3", "OK", 3388, 65536),
        npu_smi.Chip(1, 1, "910B3", "OK", 3391, 65536),
    )
    assert said(a2()) == []


def test_two_chips_per_card_have_the_physical_numbers_of_their_lines():
    report = npu_smi.parse(A3)
    assert [(c.id, c.card, c.health, c.used_mib) for c in report.chips] == [
        (4, 2, "OK", 3411),
        (5, 2, "OK", 3208),
        (6, 3, "Critical", 3125),
        (7, 3, "OK", 59536),
    ]
    assert [(c.id, c.card, c.memory_mib) for c in npu_smi.parse(PAIRED).chips] == [(0, 8, 44280), (1, 8, 43693)]


@pytest.mark.parametrize(
    ("health", "level"), [("Warning", "warning"), ("Alarm", "error"), ("Critical", "error"), ("UNKNOWN", "error")]
)
def test_a_device_that_is_not_well_is_named_with_its_card_and_what_to_do(health, level):
    ((found, text),) = said(a2(health))
    assert found == level
    assert f"device 1 (card 1, 910B3) is in health {health}" in text and "npu-smi info -t health -i 1" in text


def test_only_devices_that_this_process_may_use_are_judged():
    assert said(A3, [4, 5]) == []
    assert [text.split(" (")[0] for _, text in said(A3)] == ["device 6", "device 7"]
    ((level, text),) = said(A3, [4, 9])
    assert level == "error" and "devices 9 are asked for, npu-smi info lists 4, 5, 6, 7" in text


def test_a_device_in_use_is_warned_of():
    ((level, text),) = said(a2(used="59719"))
    assert level == "warning" and "59719 of 65536 MiB in use" in text


def test_no_device_at_all_is_an_error():
    ((level, text),) = said(NO_DEVICES)
    assert level == "error" and "lists no device" in text


@pytest.mark.parametrize("text", ["", "bash: npu-smi: command not found", "+---+\n| NPU | Name |\n"])
def test_text_that_is_no_table_is_refused_with_what_was_seen(text):
    with pytest.raises(PlatformError, match="no table of devices"):
        npu_smi.parse(text)


def test_a_line_of_another_form_is_shown():
    with pytest.raises(PlatformError, match=r"not understood: 910B3 \| OK"):
        npu_smi.parse(a2().replace("| 1     910B3               |", "| 910B3                     |"))


@pytest.mark.parametrize(
    ("outcome", "match"),
    [
        (FileNotFoundError(), "npu-smi is not found: install the driver"),
        (PermissionError("Permission denied"), "cannot be run: Permission denied"),
        (subprocess.TimeoutExpired("npu-smi", 5), "does not answer within 5 s"),
        (("dcmi module initialize failed. ret is -8005\n", "", 0), "cannot reach the driver .*-8005.*restart after"),
        (("", "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)", 255), "status 255"),
        (("", "", 1), "it says: nothing"),
    ],
)
def test_a_tool_that_does_not_answer_says_what_to_do(outcome, match):
    def run(command, **how):
        assert command == ("npu-smi", "info") and how["timeout"] <= 5
        if isinstance(outcome, Exception):
            raise outcome
        return subprocess.CompletedProcess(command, outcome[2], outcome[0], outcome[1])

    with pytest.raises(PlatformError, match=match):
        npu_smi.read(run)
