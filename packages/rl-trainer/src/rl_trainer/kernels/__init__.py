"""Operations that take less time on some processors than those that torch chooses."""
