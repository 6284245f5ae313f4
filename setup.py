"""Find the packages; the folders schedules/ and simulator/ are imported as zbpp.*."""

from setuptools import find_packages, setup

_BESIDE = ("schedules", "simulator")

setup(
    packages=[
        *find_packages(include=["zbpp", "zbpp.*"]),
        *(
            f"zbpp.{name}"
            for top in _BESIDE
            for name in find_packages(include=[top, f"{top}.*"])
        ),
    ]
)
