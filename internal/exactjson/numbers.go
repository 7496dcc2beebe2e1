package exactjson

import (
	"encoding/json"
	"math/big"
	"strconv"
	"strings"
)

// PlainNumbers rewrites all numbers of a decoded value in place, as PostgreSQL's jsonb does: 1e0 becomes 1. Numbers
// with exponents over 400 stay.
func PlainNumbers(tree any) any {
	return MapNumbers(tree, func(n json.Number) any { return plainNumber(n) })
}

// MapNumbers replaces all numbers of a decoded value in place.
func MapNumbers(tree any, f func(json.Number) any) any {
	switch v := tree.(type) {
	case map[string]any:
		for key, item := range v {
			v[key] = MapNumbers(item, f)
		}
	case []any:
		for i, item := range v {
			v[i] = MapNumbers(item, f)
		}
	case json.Number:
		return f(v)
	}
	return tree
}

// plainNumber writes a number without exponent, and zero without a sign.
func plainNumber(n json.Number) json.Number {
	text := string(n)
	mantissa, exponent, _ := strings.Cut(strings.ToLower(text), "e")
	exp, err := strconv.Atoi(exponent)
	if exponent != "" && (err != nil || exp > 400 || exp < -400) {
		return n
	}
	exact, ok := new(big.Rat).SetString(text)
	if !ok || (exponent == "" && exact.Sign() != 0) {
		return n
	}
	_, fraction, _ := strings.Cut(mantissa, ".")
	return json.Number(exact.FloatString(max(0, len(fraction)-exp)))
}
