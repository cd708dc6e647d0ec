"""Privacy and robustness: unskew compared with other libraries' accountants, robust rules, attacks and compressors."""
