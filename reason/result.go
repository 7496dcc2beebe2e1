package reason

import (
	"bytes"
	"encoding/json"
	"math/big"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/executions"
)

// encode is a result as the model gets it. A result that was read back from its checkpoint, where
// PostgreSQL has put its keys in another order and written its numbers out, gives the same text as the
// result itself: the transcript of a replay is that of the first run, byte for byte.
func encode(value any) string {
	text, err := canonical(value)
	if err != nil {
		return failed(&executions.StepError{Class: "error", Message: "the result cannot be shown: " + err.Error()})
	}
	return text
}

// canonical writes JSON with sorted keys and plain numbers.
func canonical(value any) (string, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return "", err
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var tree any
	if err := decoder.Decode(&tree); err != nil {
		return "", err
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(plainNumbers(tree)); err != nil {
		return "", err
	}
	return strings.TrimSuffix(out.String(), "\n"), nil
}

// plainNumbers writes every number of a tree as PostgreSQL's jsonb does.
func plainNumbers(tree any) any {
	switch v := tree.(type) {
	case map[string]any:
		for key, item := range v {
			v[key] = plainNumbers(item)
		}
	case []any:
		for i, item := range v {
			v[i] = plainNumbers(item)
		}
	case json.Number:
		return plainNumber(v)
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
