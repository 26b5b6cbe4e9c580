"""Operations: each a plan, and one public function."""
