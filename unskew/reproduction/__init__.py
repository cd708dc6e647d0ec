"""The papers' tables and figures as presets, run at three scales, their results kept and set beside the published ones."""
