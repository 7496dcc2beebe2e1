package mcp

import (
	"strings"
	"unicode"
)

// cleanText makes foreign text safe to show to people and models. It removes control characters and invisible
// characters that could hide words or change the writing direction. It cuts at limit characters.
func cleanText(text string, limit int) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case r == '\n':
			return r
		case unicode.IsSpace(r):
			return ' '
		case isInvisible(r):
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

// isInvisible reports an invisible character. Such are control and format characters (zero width, direction, tags),
// private use, surrogates, and variation selectors.
func isInvisible(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Co, unicode.Cs, unicode.Variation_Selector) ||
		r == '\u115F' || r == '\u1160' ||
		r == '\u3164' || r == '\uFFA0' || r == '\u2028' || r == '\u2029'
}

// cleanSchema cleans the descriptive texts of a JSON Schema. It leaves names, enum, const, default and pattern.
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

func cleanKeyword(key string, value any) any {
	switch key {
	case "description", "title", "$comment":
		if text, ok := value.(string); ok {
			return cleanText(text, maxSchemaText)
		}
	case "enum", "const", "default", "examples", "pattern", "required":
		return value
	case "properties", "patternProperties", "$defs", "definitions", "dependentSchemas":
		// The keys are names, and each value is a schema.
		if schemas, ok := value.(map[string]any); ok {
			for name, schema := range schemas {
				schemas[name] = cleanSchema(schema)
			}
			return schemas
		}
	}
	return cleanSchema(value)
}
