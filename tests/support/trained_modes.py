"""The modes that most tests of training and lowering go through."""

MODES = ("FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZBV")
