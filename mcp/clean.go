package mcp

import (
	"strings"
	"unicode"
)

// cleanText makes a stranger's text fit to be read by people and models: no control characters, nothing invisible that
// could carry hidden words or turn the direction of writing, at most limit letters.
func cleanText(text string, limit int) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case r == '\n':
			return r
		case unicode.IsSpace(r):
			return ' '
		case hidden(r):
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "\uFFFD"))
	text = strings.TrimSpace(text)
	if letters := []rune(text); len(letters) > limit {
		return strings.TrimSpace(string(letters[:limit])) + "…"
	}
	return text
}

// hidden reports whether a letter is not seen: control and format characters (zero width, direction, tags), private
// use, surrogates, and the variation selectors, which can spell words.
func hidden(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Co, unicode.Cs, unicode.Variation_Selector) || r == '\u115F' || r == '\u1160' ||
		r == '\u3164' || r == '\uFFA0' || r == '\u2028' || r == '\u2029'
}

// cleanSchema cleans the texts of a JSON Schema that are there to be read. What decides about arguments (names, enum,
// const, default, pattern) stays as it is.
func cleanSchema(value any) any {
	switch v := value.(type) {
	case []any:
		for i := range v {
			v[i] = cleanSchema(v[i])
		}
	case map[string]any:
		for key, item := range v {
			v[key] = cleanKeyword(key, item)
		}
	}
	return value
}

// cleanKeyword cleans the value of one keyword.
func cleanKeyword(key string, value any) any {
	switch key {
	case "description", "title", "$comment":
		if text, ok := value.(string); ok {
			return cleanText(text, maxSchemaText)
		}
	case "enum", "const", "default", "examples", "pattern", "required":
		return value
	case "properties", "patternProperties", "$defs", "definitions", "dependentSchemas":
		// Here the keys are names, and each value is a schema.
		if schemas, ok := value.(map[string]any); ok {
			for name, schema := range schemas {
				schemas[name] = cleanSchema(schema)
			}
			return schemas
		}
	}
	return cleanSchema(value)
}
