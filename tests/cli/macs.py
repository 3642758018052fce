"""Outputs of macOS's commands, as Macs of three kinds print them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BRAND = "/usr/sbin/sysctl -n machdep.cpu.brand_string"
WIRED = "/usr/sbin/sysctl -n iogpu.wired_limit_mb"
VERSION = "/usr/bin/sw_vers -productVersion"
DISPLAYS = "/usr/sbin/system_profiler SPDisplaysDataType -json"
BATTERY = "/usr/bin/pmset -g batt"
SETTINGS = "/usr/bin/pmset -g"


@dataclass(frozen=True)
class Recorded:
    """A Mac that prints `outputs`, by command; another command fails."""

    outputs: Mapping[str, str]

    def __call__(self, command: Sequence[str]) -> str | None:
        return self.outputs.get(" ".join(command))


def displays(name: str, cores: str | None) -> str:
    one = {"_name": name, "sppci_bus": "spdisplays_builtin", "sppci_model": name}
    counted = {"sppci_cores": cores} if cores else {}
    return json.dumps({"SPDisplaysDataType": [one | counted]})


LAPTOP = Recorded({
    BRAND: "Apple M3 Pro\n",
    WIRED: "0\n",
    VERSION: "15.1\n",
    DISPLAYS: displays("Apple M3 Pro", "14"),
    BATTERY: """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=24313955)\t19%; discharging; 2:11 remaining present: true
""",
    SETTINGS: """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by powerd, sharingd)
 hibernatemode        3
 ttyskeepawake        1
 displaysleep         2 (display sleep prevented by caffeinate)
 tcpkeepalive         1
 lowpowermode         1
 womp                 0
""",
})  # fmt: skip
"""A MacBook on battery, in low power mode."""

DESKTOP = Recorded({
    BRAND: "Apple M1 Ultra\n",
    WIRED: "57344\n",
    VERSION: "14.6.1\n",
    DISPLAYS: displays("Apple M1 Ultra", "64"),
    BATTERY: "Now drawing from 'AC Power'\n",
    SETTINGS: """System-wide power settings:
Currently in use:
 disksleep            0
 sleep                0
 displaysleep         10
""",
})  # fmt: skip
"""A Mac Studio that never sleeps, and whose limit of wired memory is set."""

NEWEST = Recorded({
    BRAND: "Apple M5 Max\n",
    WIRED: "0\n",
    VERSION: "26.6.1\n",
    DISPLAYS: displays("Apple M5 Max", "40"),
    BATTERY: """Now drawing from 'AC Power'
 -InternalBattery-0 (id=23265379)\t80%; AC attached; not charging present: true
""",
    SETTINGS: """System-wide power settings:
 SleepDisabled\t\t0
Currently in use:
 SleepServices        0
 disksleep            10
 sleep                1 (sleep prevented by powerd)
 displaysleep         10
 powermode            2
""",
})  # fmt: skip
"""A MacBook with a power adapter, in high power mode."""

VIRTUAL = Recorded({
    BRAND: "Apple M1 (Virtual)\n",
    VERSION: "15.7\n",
    DISPLAYS: displays("Apple Paravirtual device", None),
    BATTERY: "Now drawing from 'AC Power'\n",
    SETTINGS: "Currently in use:\n sleep                0\n",
})  # fmt: skip
"""A virtual machine, whose GPU has no number of cores."""
