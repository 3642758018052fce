"""Outputs of macOS's commands, as Macs of three kinds print them."""

from __future__ import annotations

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
    counted = f'"sppci_cores" : "{cores}",' if cores else ""
    return f"""{{
  "SPDisplaysDataType" : [
    {{
      "_name" : "{name}",
      "spdisplays_mtlgpufamilysupport" : "spdisplays_metal3",
      "spdisplays_ndrvs" : [
        {{
          "_name" : "Color LCD",
          "_spdisplays_pixels" : "3024 x 1964",
          "spdisplays_main" : "spdisplays_yes"
        }}
      ],
      "spdisplays_vendor" : "sppci_vendor_Apple",
      "sppci_bus" : "spdisplays_builtin",
      {counted}
      "sppci_device_type" : "spdisplays_gpu",
      "sppci_model" : "{name}"
    }}
  ]
}}
"""


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
 standby              0
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            0
 sleep                0
 hibernatemode        0
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 womp                 1
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
 standby              1
 Sleep On Power Button 1
 SleepServices        0
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by powerd)
 hibernatemode        3
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 powermode            2
 womp                 1
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
