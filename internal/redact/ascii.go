package redact

func isLetter(b byte) bool { return b|0x20 >= 'a' && b|0x20 <= 'z' }

func isDigit(b byte) bool { return b >= '0' && b <= '9' }

func isWord(b byte) bool { return isLetter(b) || isDigit(b) || b == '_' }

func isToken(b byte) bool { return isWord(b) || b == '-' }

func isBase64(b byte) bool { return isLetter(b) || isDigit(b) || b == '+' || b == '/' }

// isHex reports whether s consists of hexadecimal digits.
func isHex(s string) bool {
	for _, b := range []byte(s) {
		if !isDigit(b) && (b|0x20 < 'a' || b|0x20 > 'f') {
			return false
		}
	}
	return true
}
