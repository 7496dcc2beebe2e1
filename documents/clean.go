package documents

import (
	"bytes"
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"path"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxName bounds a file name, in characters.
const maxName = 200

// unnamed is the name of a document that came without one.
const unnamed = "document"

// CleanName is a file name without folders, control characters and invisible formatting.
func CleanName(name string) string {
	name = strings.ToValidUTF8(name, "")
	name = path.Base(strings.ReplaceAll(name, `\`, "/"))
	name = strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r) {
			return -1
		}
		return r
	}, name))
	if letters := []rune(name); len(letters) > maxName {
		ext := []rune(path.Ext(name))
		if len(ext) > 10 {
			ext = nil
		}
		name = string(letters[:maxName-len(ext)]) + string(ext)
	}
	if strings.Trim(name, "./ ") == "" {
		return unnamed
	}
	return name
}

// textTypes and binaryTypes are content types by the ending of a name. They refine what the content shows.
var (
	textTypes = map[string]string{
		".csv": "text/csv", ".tsv": "text/tab-separated-values", ".json": "application/json", ".yaml": "application/yaml",
		".yml": "application/yaml", ".xml": "application/xml", ".md": "text/markdown", ".eml": "message/rfc822",
		".html": "text/html", ".htm": "text/html",
	}
	binaryTypes = map[string]string{
		".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
		".xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
		".pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
		".odt":  "application/vnd.oasis.opendocument.text",
		".ods":  "application/vnd.oasis.opendocument.spreadsheet",
	}
)

// contentType is the media type of content. The content decides; the name's ending, and then what the client claims,
// say which text it is, and which office document a ZIP file is.
func contentType(name, claimed string, content []byte) string {
	sniffed, _, err := mime.ParseMediaType(http.DetectContentType(content))
	if err != nil {
		return "application/octet-stream"
	}
	if claimed, _, err = mime.ParseMediaType(claimed); err != nil {
		claimed = ""
	}
	ending := strings.ToLower(path.Ext(name))
	switch sniffed {
	case "text/plain":
		for _, kind := range []string{textTypes[ending], claimed} {
			if readable(kind) && (kind != "application/json" || json.Valid(content)) {
				return kind
			}
		}
	case "application/zip":
		if kind := binaryTypes[ending]; kind != "" {
			return kind
		}
	}
	return sniffed
}

// readable reports a content type of text.
func readable(kind string) bool {
	switch kind {
	case "application/json", "application/yaml", "application/x-yaml", "application/xml", "message/rfc822":
		return true
	}
	return strings.HasPrefix(kind, "text/") || strings.HasSuffix(kind, "+json") || strings.HasSuffix(kind, "+xml")
}

// isText reports content that models and flows can read. PostgreSQL stores no NUL in text.
func isText(kind string, content []byte) bool {
	return readable(kind) && utf8.Valid(content) && !bytes.ContainsRune(content, 0)
}

// whole is text without the bytes of a character that was cut, at its end and at its beginning.
func whole(piece []byte) (text string, skipped int) {
	for skipped < len(piece) && skipped < utf8.UTFMax && !utf8.RuneStart(piece[skipped]) {
		skipped++
	}
	piece = piece[skipped:]
	for n := 1; n < utf8.UTFMax && n <= len(piece); n++ {
		if last := piece[len(piece)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				piece = piece[:len(piece)-n]
			}
			break
		}
	}
	return string(piece), skipped
}

// Size is a number of bytes for people.
func Size(n int64) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20:
		return fmt.Sprintf("%.1f KB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%.1f MB", float64(n)/(1<<20))
}
