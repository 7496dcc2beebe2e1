package documents

import (
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
)

// FormOverhead bounds each field of a form other than the file. Callers bound the body by the file's limit plus
// FormOverhead.
const FormOverhead = 64 << 10

// ErrForm reports a body without a file.
var ErrForm = errors.New("the body has no file")

// ReadForm reads an upload: a form (multipart/form-data) with one part named file or, if raw is set, the bare body as
// the file, without a name. It drops the form's other fields. It returns [ErrForm] or [ErrTooLarge].
func ReadForm(r *http.Request, maxBytes int64, raw bool) (Upload, error) {
	mediaType, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	u := Upload{ContentType: mediaType, MaxBytes: maxBytes}
	switch {
	case err == nil && mediaType == "multipart/form-data" && params["boundary"] != "":
		err = u.readParts(multipart.NewReader(r.Body, params["boundary"]))
		return u, err
	case raw && (err != nil || mediaType != "multipart/form-data"):
		u.Content, err = readLimited(r.Body, maxBytes)
		return u, err
	}
	return u, fmt.Errorf("%w: send multipart/form-data with a part named file, of at most %d bytes", ErrForm, maxBytes)
}

func (u *Upload) readParts(form *multipart.Reader) error {
	for found := false; ; {
		part, err := form.NextPart()
		switch {
		case errors.Is(err, io.EOF) && found:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%w: the form has no part named file", ErrForm)
		case err != nil:
			return fmt.Errorf("%w: %w", ErrForm, err)
		case part.FormName() == "file" && found:
			return fmt.Errorf("%w: the form has two parts named file", ErrForm)
		case part.FormName() == "file":
			found = true
			u.Name, u.ContentType = fileName(part), part.Header.Get("Content-Type")
			if u.Content, err = readLimited(part, u.MaxBytes); err != nil {
				return err
			}
			continue
		}
		_, err = readLimited(part, FormOverhead)
		switch {
		case errors.Is(err, ErrTooLarge): // the message of ErrTooLarge is about the document
			return fmt.Errorf("%w: the field %.40q is too long", ErrForm, part.FormName())
		case err != nil:
			return err
		}
	}
}

// unescapeFileName replaces the three sequences that browsers write into the file names of forms. They leave "%" itself
// as it is, so other sequences are part of the name.
var unescapeFileName = strings.NewReplacer("%22", `"`, "%0D", "\r", "%0A", "\n")

func fileName(part *multipart.Part) string { return unescapeFileName.Replace(part.FileName()) }

// readLimited reads all content, or returns [ErrTooLarge] if it exceeds maxBytes.
func readLimited(from io.Reader, maxBytes int64) ([]byte, error) {
	content, err := io.ReadAll(io.LimitReader(from, maxBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrForm, err)
	case int64(len(content)) > maxBytes:
		return nil, TooLarge(maxBytes)
	}
	return content, nil
}
