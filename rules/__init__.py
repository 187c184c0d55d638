"""The rules, one flat file each; lintgpu.rule finds them here."""
