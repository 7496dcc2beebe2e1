package documents

import (
	"bytes"
	"encoding/json"
	"mime"
	"net/http"
	"path"
	"strings"
	"unicode/utf8"
)

// textTypes and officeTypes are content types by file extension. textTypes refine text/plain, officeTypes a ZIP file.
var (
	textTypes = map[string]string{
		".csv": "text/csv", ".tsv": "text/tab-separated-values", ".json": "application/json", ".yaml": "application/yaml",
		".yml": "application/yaml", ".xml": "application/xml", ".md": "text/markdown", ".eml": "message/rfc822",
		".html": "text/html", ".htm": "text/html",
	}
	officeTypes = map[string]string{
		".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
		".xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
		".pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
		".odt":  "application/vnd.oasis.opendocument.text",
		".ods":  "application/vnd.oasis.opendocument.spreadsheet",
	}
)

// contentType detects the media type of content. The extension, then the client's type, refine text/plain to a text
// type; a JSON type needs valid JSON. The extension refines a ZIP file to an office document. Other detected types,
// such as text/html, stay.
func contentType(name, claimed string, content []byte) string {
	sniffed, _, err := mime.ParseMediaType(http.DetectContentType(content))
	if err != nil {
		return "application/octet-stream"
	}
	if claimed, _, err = mime.ParseMediaType(claimed); err != nil {
		claimed = ""
	}
	ext := strings.ToLower(path.Ext(name))
	switch sniffed {
	case "text/plain":
		for _, mediaType := range []string{textTypes[ext], claimed} {
			isJSON := mediaType == "application/json" || strings.HasSuffix(mediaType, "+json")
			if isTextType(mediaType) && (!isJSON || json.Valid(content)) {
				return mediaType
			}
		}
	case "application/zip":
		if mediaType := officeTypes[ext]; mediaType != "" {
			return mediaType
		}
	}
	return sniffed
}

// isTextType reports whether a media type is text/*, JSON, YAML, XML, or a mail.
func isTextType(mediaType string) bool {
	switch mediaType {
	case "application/json", "application/yaml", "application/x-yaml", "application/xml", "message/rfc822":
		return true
	}
	return strings.HasPrefix(mediaType, "text/") || strings.HasSuffix(mediaType, "+json") ||
		strings.HasSuffix(mediaType, "+xml")
}

// isText reports whether models and flows can read the content. PostgreSQL stores no NUL in text.
func isText(mediaType string, content []byte) bool {
	return isTextType(mediaType) && utf8.Valid(content) && !bytes.ContainsRune(content, 0)
}
